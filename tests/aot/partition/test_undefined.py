"""Backward graphs for some of the tangents: what follows from the others is gone, or zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from stator.aot.partition.undefined import mark_tangents, without_tangents
from stator.graph.verify import verify
from tests.aot.partition.programs import Flat, called, leaf, run_halves, split, traced

aten = torch.ops.aten


class Pruned:
    """The halves of a program, its backward pruned of the tangents in `missing`."""

    def __init__(
        self, fn: Flat, *inputs: Any, missing: Sequence[int], symbolic: bool = False
    ) -> None:
        joint = traced(fn, *inputs, symbolic=symbolic)
        self.halves = split(joint)
        backward = self.halves.backward
        assert backward is not None, "there is a backward"
        self.module: fx.GraphModule = backward
        placeholders = backward.graph.find_nodes(op="placeholder")
        self.tangents = placeholders[len(self.halves.saved) :]
        mark_tangents(backward.graph, self.tangents)
        without_tangents(backward.graph, [self.tangents[i] for i in missing])
        verify(backward.graph, after="without_tangents")
        backward.recompile()

    def gradients(self, inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Run both halves; of a tangent that nothing reads any more, None will do."""
        _, grads = run_halves(self.halves, inputs, tangents)
        found: list[Any] = grads
        return found

    def outputs(self) -> list[Any]:
        (output,) = self.module.graph.find_nodes(op="output")
        return list(output.args[0])


def eager_gradients(fn: Flat, inputs: Sequence[Tensor], tangents: dict[int, Tensor]) -> list[Any]:
    """What eager computes when only some outputs are used."""
    outputs = fn(*inputs)
    used = [outputs[i] for i in tangents]
    return list(torch.autograd.grad(used, inputs, list(tangents.values()), allow_unused=True))


# Dropped


def both(x: Tensor) -> list[Tensor]:
    return [x.sin(), x.exp()]


def test_of_a_sum_the_defined_side_stays() -> None:
    pruned = Pruned(both, leaf(3), missing=[1])
    x, tangent = leaf(3), torch.randn(3)

    grads = pruned.gradients([x], [tangent, None])

    assert "add.Tensor" not in called(pruned.module)
    torch.testing.assert_close(grads, eager_gradients(both, [x], {0: tangent}))


def test_either_side_of_a_sum_may_be_the_missing_one() -> None:
    pruned = Pruned(both, leaf(3), missing=[0])
    x, tangent = leaf(3), torch.randn(3)

    grads = pruned.gradients([x], [None, tangent])

    torch.testing.assert_close(grads, eager_gradients(both, [x], {1: tangent}))


def test_what_follows_from_missing_tangents_alone_is_not_run() -> None:
    everything = Pruned(both, leaf(3), missing=[])
    pruned = Pruned(both, leaf(3), missing=[1])

    assert "cos.default" in called(everything.module)
    assert len(called(everything.module)) > len(called(pruned.module))
    assert called(pruned.module) == ["cos.default", "mul.Tensor"]


def test_a_missing_tangent_is_read_by_nobody() -> None:
    pruned = Pruned(both, leaf(3), missing=[1])

    assert [bool(node.users) for node in pruned.tangents] == [True, False]


def test_a_gradient_of_missing_tangents_alone_is_none() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.sin(), y.exp()]

    pruned = Pruned(fn, leaf(3), leaf(3), missing=[1])
    inputs, tangent = [leaf(3), leaf(3)], torch.randn(3)

    grads = pruned.gradients(inputs, [tangent, None])

    assert pruned.outputs()[1] is None
    assert grads[1] is None
    torch.testing.assert_close(grads[0], eager_gradients(fn, inputs, {0: tangent})[0])


def test_a_chain_of_sums_keeps_every_defined_term() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x.sin(), x.exp(), x.tanh(), x * 3]

    pruned = Pruned(fn, leaf(3), missing=[0, 2])
    x, one, other = leaf(3), torch.randn(3), torch.randn(3)

    grads = pruned.gradients([x], [None, one, None, other])

    assert called(pruned.module).count("add.Tensor") == 1
    torch.testing.assert_close(grads, eager_gradients(fn, [x], {1: one, 3: other}))


def test_a_missing_tangent_behind_several_operators_is_followed_to_the_sum() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        h = (x @ y).tanh()
        return [h.sum(0), (h * 2).exp()]

    pruned = Pruned(fn, leaf(2, 3), leaf(3, 2), missing=[0])
    inputs, tangent = [leaf(2, 3), leaf(3, 2)], torch.randn(2, 2)

    grads = pruned.gradients(inputs, [None, tangent])

    torch.testing.assert_close(grads, eager_gradients(fn, inputs, {1: tangent}))


def test_with_every_tangent_there_nothing_changes() -> None:
    joint = traced(both, leaf(3))
    backward = split(joint).backward
    assert backward is not None
    before = str(backward.graph)
    placeholders = backward.graph.find_nodes(op="placeholder")

    mark_tangents(backward.graph, placeholders[-2:])
    without_tangents(backward.graph, [])

    assert str(backward.graph) == before


# Zeros


def stacked(x: Tensor) -> list[Tensor]:
    """A program whose backward puts its tangents together: no sum, so that zeros are needed."""
    return [row * 2 for row in x.sin().unbind(0)]


def test_where_another_operator_mixes_both_the_missing_side_is_zeros() -> None:
    pruned = Pruned(stacked, leaf(3, 2), missing=[0, 2])
    x, tangent = leaf(3, 2), torch.randn(2)

    grads = pruned.gradients([x], [None, tangent, None])

    assert called(pruned.module).count("full.default") == 2
    assert [bool(node.users) for node in pruned.tangents] == [False, True, False]
    torch.testing.assert_close(grads, eager_gradients(stacked, [x], {1: tangent}))


class Weighted(torch.autograd.Function):
    """Two outputs whose tangents the backward adds with different weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return torch.add(one, other, alpha=2)


def test_a_sum_with_weights_is_no_plain_sum() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return list(Weighted.apply(x))

    pruned = Pruned(fn, leaf(3), missing=[0])
    x, tangent = leaf(3), torch.randn(3)

    grads = pruned.gradients([x], [None, tangent])

    torch.testing.assert_close(grads, eager_gradients(fn, [x], {1: tangent}))


def test_zeros_have_the_type_of_the_tangent() -> None:
    pruned = Pruned(stacked, leaf(3, 2).detach().double().requires_grad_(), missing=[0])
    (zeros,) = pruned.module.graph.find_nodes(op="call_function", target=aten.full.default)

    assert zeros.args == ([2], 0)
    assert zeros.kwargs == {"dtype": torch.float64, "device": torch.device("cpu")}


def test_zeros_of_a_symbolic_size_come_from_a_tangent_of_zeros() -> None:
    pruned = Pruned(stacked, leaf(3, 4), missing=[0, 2], symbolic=True)

    x, tangent, zeros = leaf(3, 7), torch.randn(7), torch.zeros(7)

    grads = pruned.gradients([x], [zeros, tangent, zeros])

    assert "full.default" not in called(pruned.module)
    assert all(node.users for node in pruned.tangents)
    torch.testing.assert_close(grads, eager_gradients(stacked, [x], {1: tangent}))


# Marks


def test_marks_tell_what_depends_on_a_tangent() -> None:
    backward = split(traced(lambda x: [x.sin() * 2], leaf(3))).backward
    assert backward is not None
    (tangent,) = backward.graph.find_nodes(op="placeholder")[-1:]

    mark_tangents(backward.graph, [tangent])

    marks = {node.target: node.meta["depends_on_tangent"] for node in backward.graph.nodes}
    assert marks[aten.cos.default] is False
    assert marks[aten.mul.Tensor] is True
    assert marks["output"] is True
