"""Graphs that fail become small, and fail as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import stator
from benchmarks.bug_graphs import make_graph
from benchmarks.bugs import BUGS
from benchmarks.faults import planted
from stator.debug.minify.blame import blame
from stator.debug.minify.case import case_of
from stator.debug.minify.checks import Elsewhere
from stator.debug.minify.failure import Failure, normalised
from stator.debug.minify.judge import How, class_of, judge
from stator.debug.minify.minifier import Wishes, minimise, resume
from stator.debug.minify.record import copy_of, record
from stator.debug.minify.script import made, read_script
from stator.debug.minify.worker import started_worker
from stator.errors import StatorError

aten = torch.ops.aten

IN_PROCESS = (
    "share_subexpressions, maximum",  # with symbolic sizes alone
    "fold_uniform, maximum",  # strides
    "rule sub_of_neg",
    "lowering of slice",
    "code of cos, doubled",
)


def number_of(name: str) -> int:
    """The first bug of that name."""
    return next(number for number, bug in enumerate(BUGS) if bug.name == name)


def calls(module: fx.GraphModule) -> list[str]:
    """Targets, in order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def chain(*targets: Any) -> fx.GraphModule:
    """A graph of unary operators."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_bug_is_minimised_and_the_guilty_step_named(name: str, tmp_path: Path) -> None:
    with planted(number_of(name)) as bug:
        module, inputs = make_graph(60, seed=1)
        found = stator.minifier(module, inputs, dynamic=bug.dynamic, folder=tmp_path, isolate=False)
        assert found.left <= 3 < found.begun
        assert (found.failure.kind, found.failure.dynamic) == (bug.kind, bug.dynamic)

        assert found.script is not None
        again = read_script(found.script)
        assert class_of(again.case, again.how) == found.failure

        guilty = blame(again.case, again.how, found.failure)
        assert guilty.stage == bug.stage
        assert bug.blame in str(guilty)
    assert judge(again.case, again.how) == []


def test_a_kernel_that_never_returns_is_minimised_from_outside(tmp_path: Path) -> None:
    with planted(number_of("code of sin, spins")):
        module = chain(aten.tanh.default, aten.sin.default, aten.neg.default)
        found = stator.minifier(module, [torch.randn(2)], folder=tmp_path)
    assert found.failure.kind == "hang"
    assert calls(found.module) == ["aten.sin.default"]


def test_a_process_that_dies_is_a_finding() -> None:
    module, inputs = chain(aten.tanh.default), [torch.randn(3)]
    with planted(number_of("code of tanh, into_nowhere")), started_worker() as worker:
        failure = Elsewhere(How(), worker).first(case_of(module, inputs))
    assert failure is not None
    assert failure.message == "killed by SIGSEGV"


def fails_with(*wanted: str) -> Callable[[fx.GraphModule, list[Any]], bool]:
    """Fails where each operator is there and none of them is an input."""

    def fails(module: fx.GraphModule, inputs: list[Any]) -> bool:
        module(*inputs)
        return all(any(f"aten.{name}." in call for call in calls(module)) for name in wanted)

    return fails


def test_the_way_between_two_distant_operators_is_cut_out() -> None:
    middle = [aten.sin.default, aten.cos.default] * 20
    module = chain(aten.neg.default, aten.exp.default, *middle, aten.tanh.default, aten.abs.default)

    small, inputs = stator.minifier(module, [torch.randn(4, 6)], fails_with("exp", "tanh"))

    # One of them reads an input that holds what eager computed, so a second output goes too.
    assert sorted(calls(small)) == ["aten.exp.default", "aten.tanh.default"]
    small(*inputs)


def test_outputs_go_that_do_not_matter() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = [graph.call_function(aten.mul.Tensor, (x, n)) for n in range(16)]
    wanted = graph.call_function(aten.exp.default, (values[9],))
    graph.output((*values, wanted))
    module = fx.GraphModule(torch.nn.Module(), graph)

    small, _ = stator.minifier(module, [torch.randn(2)], fails_with("exp"))

    assert calls(small) == ["aten.exp.default"]


def test_alike_inputs_become_one_and_sizes_and_constants_small() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(aten.add.Tensor, (x, y), {"alpha": 37})
    graph.output((graph.call_function(aten.view.default, (total, [24])),))
    module = fx.GraphModule(torch.nn.Module(), graph)

    small, inputs = stator.minifier(
        module, [torch.randn(4, 6), torch.randn(4, 6)], fails_with("add", "view")
    )

    assert len(inputs) == 1
    assert inputs[0].numel() < 24
    (add,) = small.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert add.kwargs["alpha"] == 0


def test_tensors_of_the_module_become_inputs() -> None:
    root = torch.nn.Module()
    root.register_buffer("weight", torch.randn(3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    graph.output((graph.call_function(aten.mul.Tensor, (x, weight)),))

    case = case_of(fx.GraphModule(root, graph), [torch.randn(3)])

    assert len(case.inputs) == 2
    assert not case.graph.find_nodes(op="get_attr")


def test_a_graph_that_does_not_fail_is_refused() -> None:
    with pytest.raises(StatorError, match="does not fail"):
        stator.minifier(chain(aten.sin.default), [torch.randn(3)], isolate=False)


def test_values_may_be_recorded_on_disk(tmp_path: Path) -> None:
    case = case_of(chain(aten.sin.default, aten.cos.default), [torch.randn(3)])

    values = record(case, tmp_path)

    assert len(list(tmp_path.iterdir())) == 3
    for node in case.calls:
        assert torch.equal(values(node), record(case)(node))


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with planted(number_of("drop_noops, tanh")):
        module, inputs = make_graph(40, seed=1)
        wishes = Wishes(folder=tmp_path, isolate=False, seconds=0)  # no time for a single try
        begun = minimise(case_of(module, inputs), None, wishes)
        assert begun.left == begun.begun
        found = resume(tmp_path, isolate=False)
    assert found.left == 1
    assert found.begun == begun.begun


def test_a_backward_that_fails_is_minimised(tmp_path: Path) -> None:
    module = chain(aten.exp.default, aten.sin.default, aten.neg.default)
    inputs = [torch.randn(3, requires_grad=True)]
    with planted(number_of("code of cos, too_busy")):  # the derivative of sin
        found = stator.minifier(module, inputs, folder=tmp_path, isolate=False)
    assert calls(found.module) == ["aten.sin.default"]
    assert found.inputs[0].requires_grad


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("no rule for add_12 of [3, 4]", "no rule for add_1 of [17]"),
        ("at 0x7f00 of s77", "at 0xabc of s3"),
        ("first line\nand the rest", "first line"),
    ],
)
def test_messages_that_mean_the_same_are_equal(text: str, same: str) -> None:
    assert normalised(text) == normalised(same)


def test_messages_that_mean_something_else_are_not() -> None:
    assert normalised("no rule for add") != normalised("no rule for mul")
    assert Failure("crash", "a") != Failure("crash", "b")
    assert Failure("crash", "a", detail="x") == Failure("crash", "a", detail="y")


@pytest.mark.parametrize("tensor", [torch.randn(4, 6).t(), torch.randn(4, 1).expand(4, 3)])
def test_copies_lie_as_what_they_copy(tensor: torch.Tensor) -> None:
    copied = copy_of(tensor)

    assert torch.equal(copied, tensor)
    assert copied.stride() == tensor.stride()
    assert copied.data_ptr() != tensor.data_ptr()


def test_made_tensors_follow_from_their_seed() -> None:
    one, other = (made((4, 6), (1, 4), torch.float32, seed=7) for _ in range(2))

    assert torch.equal(one, other)
    assert one.stride() == (1, 4)
    assert not torch.equal(one, made((4, 6), (1, 4), torch.float32, seed=8))
