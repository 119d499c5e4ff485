"""Two halves that together are the joint graph, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.metadata import Kept, Saved
from stator.aot.partition.split import Split
from stator.graph.verify import is_input_update, verify
from tests.aot import custom_operators as custom_operators  # registers them
from tests.aot.partition.programs import (
    Flat,
    called,
    checkpointed,
    leaf,
    run_halves,
    split,
    traced,
)

aten = torch.ops.aten
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


def halves_of(fn: Flat, *inputs: Any, symbolic: bool = False) -> Split:
    return split(traced(fn, *inputs, symbolic=symbolic))


def placeholders(module: fx.GraphModule | None) -> list[str]:
    assert module is not None, "there is a backward"
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def outputs(module: fx.GraphModule | None) -> list[Any]:
    assert module is not None, "there is a backward"
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def tensors(count: int) -> tuple[Saved, ...]:
    return tuple(Saved(Kept.EXTRA, index, is_tensor=True) for index in range(count))


# Values and gradients


PROGRAMS: dict[str, tuple[Flat, Callable[[], list[Tensor]]]] = {
    "elementwise": (lambda x: [x.sin().exp() * x], lambda: [leaf(3)]),
    "matrices": (lambda x, y: [(x @ y).relu()], lambda: [leaf(2, 3), leaf(3, 2)]),
    "two outputs": (lambda x, y: [x * y, (x + y).tanh()], lambda: [leaf(3), leaf(3)]),
    "views": (lambda x: [x.t().sin().reshape(-1) * 2], lambda: [leaf(3, 3)]),
    "parts": (lambda x: [x.max(0)[0] * 3], lambda: [leaf(3, 2)]),
    "one input without grad": (lambda x, y: [x * y.exp()], lambda: [leaf(3), torch.randn(3)]),
    "one output without grad": (lambda x: [x.sin(), x.argmax()], lambda: [leaf(3)]),
    "constant": (lambda x: [x * torch.tensor([1.0, 2.0, 3.0])], lambda: [leaf(3)]),
}

programs = pytest.mark.parametrize(("fn", "make"), PROGRAMS.values(), ids=PROGRAMS.keys())


@programs
def test_the_halves_compute_values_and_gradients_of_eager(
    fn: Flat, make: Callable[[], list[Tensor]]
) -> None:
    inputs = make()
    eager = fn(*inputs)
    differentiable = [value for value in eager if value.requires_grad]
    tangents = [torch.randn_like(value) for value in differentiable]
    wanted = [x for x in inputs if x.requires_grad]
    expected = torch.autograd.grad(differentiable, wanted, tangents)

    values, grads = run_halves(halves_of(fn, *inputs), inputs, tangents)

    torch.testing.assert_close(values, [value.detach() for value in eager])
    torch.testing.assert_close(grads, list(expected))


@programs
def test_both_halves_are_sound_graphs(fn: Flat, make: Callable[[], list[Tensor]]) -> None:
    halves = halves_of(fn, *make())

    assert halves.backward is not None
    for module in (halves.forward, halves.backward):
        verify(module.graph, after="partition")


def test_without_tangents_there_is_only_a_forward() -> None:
    halves = halves_of(lambda x: [x.sin() + 1], torch.randn(3))

    assert halves.backward is None
    assert halves.saved == ()
    assert called(halves.forward) == ["sin.default", "add.Tensor"]


def test_the_joint_graph_is_left_as_it_was() -> None:
    joint = traced(lambda x: [x.sin().exp()], leaf(3))
    before = str(joint.module.graph)

    split(joint)

    assert str(joint.module.graph) == before


def test_there_is_a_gradient_for_each_input_that_wants_one() -> None:
    halves = halves_of(lambda x, y: [x.sin() * y.sin()], leaf(3), torch.randn(3))

    assert len(outputs(halves.backward)) == 1


def test_every_input_is_taken_even_if_nothing_reads_it() -> None:
    halves = halves_of(lambda x, unread: [x.sin()], leaf(3), torch.randn(3))

    assert len(placeholders(halves.forward)) == 2


# What is saved, and where it stands


def test_an_input_that_the_backward_reads_is_saved_in_its_place() -> None:
    halves = halves_of(lambda a, x: [x.sin() + a], leaf(3), leaf(3))

    assert halves.saved == (Saved(Kept.PRIMAL, 1, is_tensor=True),)
    assert len(outputs(halves.forward)) == 1


def test_a_value_that_the_backward_reads_is_not_returned_twice() -> None:
    halves = halves_of(lambda x: [x * 2, x.exp()], leaf(3))

    assert halves.saved == (Saved(Kept.VALUE, 1, is_tensor=True),)
    assert len(outputs(halves.forward)) == 2


def test_any_other_value_is_returned_behind_the_values() -> None:
    halves = halves_of(lambda x: [x.exp().sin()], leaf(3))

    assert halves.saved == tensors(1)
    assert [node.target for node in outputs(halves.forward)] == [
        aten.sin.default,
        aten.exp.default,
    ]


def test_what_the_backward_does_not_read_is_not_saved() -> None:
    halves = halves_of(lambda x, y: [(x + y) * 2 - 1], leaf(3), leaf(3))

    assert halves.saved == ()
    assert called(halves.backward) == ["mul.Tensor"]


def test_a_value_is_saved_once_however_often_it_is_read() -> None:
    halves = halves_of(lambda x: [x.exp().sin() * 2, x.exp().sin().cos()], leaf(3))
    names = placeholders(halves.backward)

    assert len(names) == len(set(names))
    assert len(halves.saved) == len({(s.kept, s.index) for s in halves.saved})


def test_the_backward_takes_what_was_saved_and_then_the_tangents() -> None:
    joint = traced(lambda x, y: [x * y, x.exp().sin()], leaf(3), leaf(3))
    halves = split(joint)

    names = placeholders(halves.backward)

    assert len(names) == len(halves.saved) + 2
    assert names[len(halves.saved) :] == [node.name for node in joint.tangents]


def test_numbers_are_saved_behind_tensors() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x * x.shape[0] * y).sum(0) * y.shape[1]]

    halves = halves_of(fn, leaf(3, 4), leaf(3, 4), symbolic=True)
    kinds = [saved.is_tensor for saved in halves.saved]

    assert True in kinds
    assert False in kinds
    assert kinds == sorted(kinds, reverse=True)


def test_symbolic_halves_serve_other_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x * x.shape[0] * y).sum(0) * y.shape[1]]

    halves = halves_of(fn, leaf(3, 4), leaf(3, 4), symbolic=True)
    inputs, tangent = [leaf(5, 7), leaf(5, 7)], torch.randn(7)
    expected = torch.autograd.grad(fn(*inputs), inputs, [tangent])

    values, grads = run_halves(halves, inputs, [tangent])

    torch.testing.assert_close(values, [value.detach() for value in fn(*inputs)])
    torch.testing.assert_close(grads, list(expected))


# Views


def test_of_a_view_the_base_is_saved_and_the_view_made_again() -> None:
    halves = halves_of(lambda x: [x.t().sin()], leaf(2, 3))

    assert halves.saved == (Saved(Kept.PRIMAL, 0, is_tensor=True),)
    assert called(halves.backward)[0] == "t.default"


def test_a_view_is_made_late_where_it_is_read() -> None:
    halves = halves_of(lambda x: [(x.t().sin() * 2).tanh()], leaf(2, 3))
    names = called(halves.backward)

    assert names.index("t.default") == names.index("cos.default") - 1
    assert names.index("t.default") > names.index("tanh_backward.default")


# Mutated inputs


def write_then_use(x: Tensor, state: Tensor) -> list[Tensor]:
    old = state.clone()
    state.mul_(2)
    return [x * old * state]


def use_then_write(x: Tensor, state: Tensor) -> list[Tensor]:
    out = (x + state).exp()
    with torch.no_grad():
        state.mul_(2)
    return [out * 1]


def use_then_transpose(x: Tensor, state: Tensor) -> list[Tensor]:
    out = (x + state).exp()
    state.t_()
    return [out * 1]


def halves_from_inputs(fn: Flat, *inputs: Tensor) -> Split:
    """Halves whose backward starts from the inputs: all between is checkpointed."""
    joint = traced(fn, *inputs)
    checkpointed(joint, {"add.Tensor", "exp.default", "mul.Tensor"}, MUST_RECOMPUTE)
    return split(joint)


def test_the_forward_writes_the_new_value_of_an_input_last() -> None:
    x, state = leaf(3), torch.randn(3)
    old, tangent = state.clone(), torch.randn(3)
    halves = halves_of(write_then_use, x, state)
    (update,) = (node for node in halves.forward.graph.nodes if is_input_update(node))

    values, grads = run_halves(halves, [x, state], [tangent])

    assert update.args[0].name == placeholders(halves.forward)[1]
    assert called(halves.forward)[-1] == "copy_.default"
    torch.testing.assert_close(state, old * 2)
    torch.testing.assert_close(values, [x.detach() * old * old * 2])
    torch.testing.assert_close(grads, [tangent * old * old * 2])


def test_an_input_about_to_be_overwritten_is_saved_as_a_copy() -> None:
    x, state = leaf(3), torch.randn(3)
    old, tangent = state.clone(), torch.randn(3)
    halves = halves_from_inputs(use_then_write, x, state)
    names = called(halves.forward)

    _, grads = run_halves(halves, [x, state], [tangent])

    assert set(halves.saved) == {
        Saved(Kept.PRIMAL, 0, is_tensor=True),
        Saved(Kept.EXTRA, 0, is_tensor=True),
    }
    assert outputs(halves.forward)[-1].target is aten.clone.default
    assert names.index("clone.default") < names.index("copy_.default")
    torch.testing.assert_close(state, old * 2)
    torch.testing.assert_close(grads, [tangent * (x.detach() + old).exp()])


def test_an_input_that_becomes_another_view_is_saved_through_an_alias() -> None:
    halves = halves_from_inputs(use_then_transpose, leaf(3, 3), torch.randn(3, 3))

    assert Saved(Kept.EXTRA, 0, is_tensor=True) in halves.saved
    assert outputs(halves.forward)[-1].target is aten.alias.default


# Checkpointing and random numbers


def test_a_checkpointed_region_is_computed_in_the_backward_from_its_inputs() -> None:
    joint = traced(lambda x: [x.exp().sin().tanh() * 2], leaf(3))
    checkpointed(joint, {"exp.default", "sin.default"}, MUST_RECOMPUTE)
    halves = split(joint)
    x, tangent = leaf(3), torch.randn(3)
    eager = x.exp().sin().tanh() * 2

    values, grads = run_halves(halves, [x], [tangent])

    assert Saved(Kept.PRIMAL, 0, is_tensor=True) in halves.saved
    assert "exp.default" in called(halves.backward)
    torch.testing.assert_close(values, [eager.detach()])
    torch.testing.assert_close(grads, list(torch.autograd.grad(eager, [x], [tangent])))


def test_without_checkpointing_nothing_is_computed_twice() -> None:
    halves = halves_of(lambda x: [x.exp().sin().tanh() * 2], leaf(3))

    assert "exp.default" not in called(halves.backward)
    assert "tanh.default" not in called(halves.backward)


def test_random_numbers_are_drawn_in_the_forward_alone() -> None:
    halves = halves_of(lambda x: [F.dropout(x)], leaf(1000))
    x, tangent = leaf(1000), torch.ones(1000)

    values, grads = run_halves(halves, [x], [tangent])

    assert "bernoulli.p" in called(halves.forward)
    assert "bernoulli.p" not in called(halves.backward)
    torch.testing.assert_close(values[0], grads[0] * x.detach())


# Effects


def test_an_effect_of_the_forward_happens_there_once() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        torch.ops.stator_test.write_down("sum", x.detach())
        return [x.sin()]

    halves = halves_of(fn, leaf(3))

    assert called(halves.forward).count("write_down.default") == 1
    assert "write_down.default" not in called(halves.backward)
