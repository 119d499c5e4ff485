"""Freezing a graph by hand: `stator.freeze` and `stator.fw_compiler_freezing`.

Under torch's own autograd, too, as whoever moves a backend of his from Inductor would call them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import stator
from stator.core.torch_types import Boxed
from stator.errors import StatorWarning
from stator.patterns import fwd_only
from tests.passes.freezing.ways import expected_ways

X, W, B = torch.randn(7, 256), nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256))


@pytest.fixture(autouse=True)
def the_expected_way() -> Iterator[None]:
    with expected_ways():
        yield


def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b.exp(), x, (w * 2).t()).relu()


def traced() -> torch.fx.GraphModule:
    with torch.no_grad():
        return fwd_only(program, (X, W.detach(), B.detach()))


def test_weights_become_attributes_and_the_rest_is_taken() -> None:
    graph = traced()
    before = str(graph.graph)
    frozen, kept = stator.freeze(graph, graph, [X, W, B])

    assert kept == [0]
    assert len(frozen.graph.find_nodes(op="placeholder")) == 1
    assert str(graph.graph) == before, "what was given is left as it is"
    with torch.no_grad():
        torch.testing.assert_close(frozen(X)[0], program(X, W, B), rtol=1e-4, atol=1e-4)


def test_without_weights_nothing_is_frozen() -> None:
    graph = traced()
    frozen, kept = stator.freeze(graph, graph, [X, W.detach(), B.detach()])

    assert kept == [0, 1, 2]
    torch.testing.assert_close(frozen(X, W.detach(), B.detach())[0], program(X, W, B).detach())


def test_a_frozen_graph_compiles_and_takes_all_inputs() -> None:
    graph = traced()
    run = stator.fw_compiler_freezing(graph, [X, W, B], graph)
    expected = program(X, W, B).detach()
    with torch.no_grad():
        torch.testing.assert_close(run([X, W, B])[0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            run([2 * X, W, B])[0], program(2 * X, W, B), rtol=1e-4, atol=1e-4
        )


class Counting(nn.Module):
    """Writes to a buffer, returns a view of a parameter, and has others that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))
        self.returned = nn.Parameter(torch.randn(256))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.rand(256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The product, the view, and what it counted."""
        self.calls.add_(1)
        return (
            x @ (self.weight * self.scale) + self.returned,
            self.returned.view(2, 128),
            self.calls,
        )


AS_TORCH_GIVES: dict[str, Any] = {
    "num_example_inputs": 1,
    "inner_compile": None,
    "cudagraphs": False,
    "graph_id": 0,
    "forward_device": None,
}


class Backend:
    """A backend on torch's autograd, and what became of the inputs."""

    def __init__(self, by: str) -> None:
        self.by, self.dropped = by, -1
        compilers = {
            "fw_compiler": self.compiled,
            "bw_compiler": lambda module, _: make_boxed_func(module),
        }
        self.backend = aot_autograd(**compilers, inference_compiler=self.compiled)

    def compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """An inference graph, frozen in one of two ways."""
        if self.by == "fw_compiler_freezing":
            run = stator.fw_compiler_freezing(module, inputs, module, **AS_TORCH_GIVES)
            notes = stator.last_compilation()
            assert notes is not None
            self.notes = notes.notes
            return run
        frozen, kept = stator.freeze(module, module, inputs)
        self.dropped = len(inputs) - len(kept)

        def boxed(arguments: list[Any]) -> Sequence[Any]:
            given = [arguments[place] for place in kept]
            arguments.clear()
            results: Sequence[Any] = frozen(*given)
            return results

        boxed._boxed_call = True  # type: ignore[attr-defined]  # how torch knows such functions
        return boxed


def agrees(compiled: Callable[..., Any], reference: nn.Module) -> None:
    """Whether a compiled module and another one give the same, call after call."""
    for _ in range(3):
        x = torch.randn(8, 256)
        for ours, plain in zip(compiled(x), reference(x), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def with_values() -> Any:
    return torch._dynamo.config.patch(prepare_freezing=True)


def test_torchs_autograd_hands_parameters_over_and_those_that_are_only_read_are_frozen() -> None:
    module, freezing = Counting(), Backend("freeze")
    reference = copy.deepcopy(module)
    with torch.no_grad(), with_values():
        agrees(torch.compile(module, backend=freezing.backend), reference)
    assert freezing.dropped == 2, "the weight and the scale, not what is written or returned"


@pytest.mark.parametrize("known", [False, True])
def test_torchs_autograd_may_keep_the_values_of_weights_until_the_first_call(known: bool) -> None:
    module, freezing = Counting(), Backend("fw_compiler_freezing")
    reference = copy.deepcopy(module)
    with torch.no_grad(), torch._dynamo.config.patch(prepare_freezing=known):
        agrees(torch.compile(module, backend=freezing.backend), reference)
    assert "mm reads its weight packed by MKL" in freezing.notes


def test_weights_without_values_stay_inputs_and_a_warning_says_what_to_set() -> None:
    module, freezing = Counting(), Backend("freeze")
    reference = copy.deepcopy(module)
    with torch.no_grad(), pytest.warns(StatorWarning, match="2 weights .*prepare_freezing"):
        agrees(torch.compile(module, backend=freezing.backend), reference)
    assert freezing.dropped == 0


@pytest.mark.parametrize("known", [False, True])
def test_where_gradients_are_wanted_nothing_is_frozen(known: bool) -> None:
    module, freezing = Counting(), Backend("fw_compiler_freezing")
    with torch._dynamo.config.patch(prepare_freezing=known):
        compiled = torch.compile(module, backend=freezing.backend)
        x = torch.randn(8, 256)
        before = compiled(x)[0].detach()
        compiled(x)[0].sum().backward()
        with torch.no_grad():
            module.weight -= module.weight.grad
        assert not torch.allclose(compiled(x)[0], before)
    assert any("gradients are wanted" in note for note in freezing.notes)


def test_inputs_that_torch_merged_are_not_taken_for_others() -> None:
    """Of two overlapping views, the program writes to one: torch hands over their base."""

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(257)
            self.register_buffer("first", both[:256])
            self.register_buffer("second", both[1:])
            self.weight = nn.Parameter(torch.randn(256, 256))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.first.mul_(2)
            return x @ self.weight + self.first + self.second, self.first

    module, freezing = Sharing(), Backend("fw_compiler_freezing")
    reference = copy.deepcopy(module)
    with torch.no_grad(), with_values(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the merged inputs
        agrees(torch.compile(module, backend=freezing.backend), reference)
    assert "one to one" in freezing.notes[0]
