"""The attention that eager takes, on a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.graph.run import Ctx
from stator.passes.pre_grad import settle_attention as module
from stator.passes.pre_grad.settle_attention import by_flash, settle_attention
from tests.passes.on_cuda import fakes, graph_of

aten = torch.ops.aten
HOW = (0.0, False, None)


def called(q: Tensor, k: Tensor) -> list[tuple[Any, ...]]:
    """Targets of flash attention's graph, with what they are called with beside tensors."""
    graph = graph_of(lambda q, k: by_flash(q, k, k, None, HOW), q, k).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [(node.target, node.kwargs.get("scale")) for node in nodes]


def test_heads_of_a_multiple_of_eight_are_taken_as_they_are() -> None:
    q, k = fakes((2, 8, 128, 64), (2, 2, 128, 64), dtype=torch.bfloat16)

    targets = [target for target, _ in called(q, k)]

    assert aten.constant_pad_nd.default not in targets
    assert aten._scaled_dot_product_flash_attention.default in targets


def test_others_are_padded_and_scaled_by_their_own_width() -> None:
    q, k = fakes((2, 8, 128, 20), (2, 8, 128, 20), dtype=torch.bfloat16)
    found = called(q, k)

    scales = [s for t, s in found if t is aten._scaled_dot_product_flash_attention.default]

    assert scales == [20**-0.5]
    with q.fake_mode:
        assert by_flash(q, k, k, None, HOW).shape == q.shape


def test_padding_changes_no_score() -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 20).double()

    padded = [F.pad(x, (0, 4)) for x in (q, k, v)]
    wide = F.scaled_dot_product_attention(padded[0], padded[1], padded[2], scale=20**-0.5)

    torch.testing.assert_close(wide[..., :20], F.scaled_dot_product_attention(q, k, v))


def test_groups_are_said_to_torchs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def kernel_of(operands: tuple[Any, ...], how: Any, *, grouped: bool) -> Any:
        asked["grouped"] = grouped
        return by_flash

    monkeypatch.setattr(module, "_kernel_of", kernel_of)
    graph = torch.fx.symbolic_trace(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    ).graph

    assert settle_attention(graph, Ctx()) == 1
    (node,) = graph.find_nodes(op="call_function", target=by_flash)
    assert asked == {"grouped": True}
    assert (node.args[3:], node.kwargs) == ((None, HOW), {})
