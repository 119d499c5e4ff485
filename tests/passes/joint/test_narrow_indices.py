"""Places of max pooling in few bytes: the same gradients, and less is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import stator
from stator.graph.run import Ctx
from stator.passes.joint.narrow_indices import narrow_indices
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of

aten = torch.ops.aten


def pooled_and_back(x: Tensor, grad: Tensor) -> Tensor:
    _, places = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return aten.max_pool2d_with_indices_backward(
        grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places
    )


@pytest.mark.parametrize(
    ("side", "kind"), [(10, torch.int8), (12, torch.int16), (182, torch.int32)]
)
def test_the_type_has_a_number_for_each_place(side: int, kind: torch.dtype) -> None:
    x = torch.randn(1, 2, side, side)
    grad = torch.randn(1, 2, side // 2, side // 2)
    module = graph_of(pooled_and_back, x, grad)

    assert narrow_indices(module.graph, Ctx()) == 1
    module.recompile()

    casts = module.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert [node.meta["val"].dtype for node in casts] == [kind, torch.int64]
    assert torch.equal(module(x, grad), pooled_and_back(x, grad))


def test_places_that_were_given_stay() -> None:
    def back(x: Tensor, grad: Tensor, places: Tensor) -> Tensor:
        return aten.max_pool2d_with_indices_backward(
            grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        )

    x, grad = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
    module = graph_of(back, x, grad, torch.zeros(1, 1, 2, 2, dtype=torch.int64))

    assert narrow_indices(module.graph, Ctx()) == 0


@pytest.mark.parametrize("pool", [F.max_pool2d, F.adaptive_max_pool2d])
def test_gradients(pool: Callable[..., Tensor]) -> None:
    check(lambda x: pool(x.exp(), 3), torch.randn(2, 3, 12, 12, requires_grad=True))


def test_what_is_kept_is_narrow() -> None:
    plan = stator.memory_plan(lambda x: F.max_pool2d(x.sin(), 3, 2, 1), _wide())

    values = plan.graphs[0].values
    kept = [one.bytes for one in values if one.saved and "_to_copy" in one.operator]
    assert kept == [2 * 64 * 56 * 56]


def _wide() -> Tensor:
    return torch.randn(1, 64, 112, 112, requires_grad=True)
