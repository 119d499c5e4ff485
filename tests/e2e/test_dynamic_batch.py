"""One compiled model meets other batch sizes and lengths: right results, few compilations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.copies import widened
from tests.e2e.handwritten_models import GraphSum, LSTMCellLoop, ResNet, TransformerBlock
from tests.e2e.models import build
from tests.parity import check, compare_gradient, compare_values, compiled

Inputs = tuple[Any, ...]

VOCABULARY: Final = 97


def tokens_and_labels(batch: int, length: int) -> Inputs:
    return tuple(torch.randint(2, VOCABULARY, (batch, length)) for _ in range(2))


def graph_of(batch: int, edges: int) -> Inputs:
    nodes = batch + 18  # no size that equals another one: Dynamo would take them for one symbol
    return torch.randn(nodes, 6), torch.randint(nodes, (2, edges))


def model_of(name: str) -> nn.Module:
    return build(name)[0]


# A model, and inputs for sizes that change together (batch, then length or nodes and edges).
CASES: Final[dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]]] = {
    "llama": (lambda: model_of("llama_eager"), tokens_and_labels),
    "block": (TransformerBlock, lambda batch, length: (torch.randn(batch, length, 32),)),
    "resnet": (ResNet, lambda batch, size: (torch.randn(batch, 3, 4 * size, 4 * size),)),
    "gnn_index_add": (GraphSum, graph_of),
}
BATCHES: Final = ((2, 8), (3, 8), (5, 8))
LENGTHS: Final = ((2, 8), (2, 10), (2, 13))
BOTH: Final = ((2, 8), (3, 10), (5, 13))


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def run(call: Callable[..., Any], module: nn.Module, inputs: Inputs) -> tuple[Tensor, list[Any]]:
    """The output, and the gradients of every parameter."""
    module.zero_grad(set_to_none=True)
    output = first_of(call(*inputs))
    output.square().mean().backward()
    return output.detach(), [parameter.grad for parameter in module.parameters()]


def follow(name: str, sizes: tuple[tuple[int, int], ...], dynamic: bool | None) -> int:
    """Train at each size as eager does; return how many graphs were compiled."""
    torch.manual_seed(0)
    make, inputs_of = CASES[name]
    eager = make()
    own, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    ours = compiled(own, fullgraph=True, dynamic=dynamic)
    for size in sizes:
        inputs = inputs_of(*size)
        truth, truths = run(wide, wide, tuple(widened(value) for value in inputs))
        expected, gradients = run(eager, eager, inputs)
        output, mine = run(ours, own, inputs)
        compare_values(output, expected, truth, f"output at {size}")
        for index, gradient in enumerate(gradients):
            compare_gradient(mine[index], gradient, truths[index], f"parameter {index} at {size}")
    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs


@pytest.mark.parametrize("name", ["block", "resnet", "gnn_index_add"])
def test_new_batch_sizes_compile_once_more_and_never_again(name: str) -> None:
    assert follow(name, BATCHES, dynamic=None) == 2


@pytest.mark.parametrize("name", ["llama", "block", "gnn_index_add"])
def test_new_lengths_compile_once_more_and_never_again(name: str) -> None:
    assert follow(name, LENGTHS, dynamic=None) == 2


@pytest.mark.parametrize("name", ["llama", "block", "gnn_index_add"])
def test_dynamic_from_the_start_compiles_once(name: str) -> None:
    assert follow(name, BOTH, dynamic=True) == 1


def test_static_sizes_compile_each() -> None:
    assert follow("block", BATCHES, dynamic=False) == len(BATCHES)


def test_marked_dimensions_compile_once() -> None:
    torch.manual_seed(0)
    module = TransformerBlock()
    ours = compiled(module, fullgraph=True)

    for batch, length in BOTH:
        value = torch.randn(batch, length, 32)
        torch._dynamo.mark_dynamic(value, 0)
        torch._dynamo.mark_dynamic(value, 1)
        torch.testing.assert_close(ours(value), module(value))

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_sizes_seen_before_come_back() -> None:
    assert follow("block", (*BATCHES, *reversed(BATCHES)), dynamic=None) == 2


def test_inference_at_changing_sizes_matches_eager() -> None:
    module = TransformerBlock().eval()
    ours = compiled(module, fullgraph=True)

    with torch.no_grad():
        for batch, length in (*BOTH, (1, 8), (2, 1), (1, 1)):  # ones are always special to Dynamo
            value = torch.randn(batch, length, 32)
            torch.testing.assert_close(ours(value), module(value))


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_dynamic_model_at_edge_batches_matches_eager(batch: int) -> None:
    torch.manual_seed(0)

    check(LSTMCellLoop(), torch.randn(batch, 5, 6), dynamic=True, fullgraph=True)
