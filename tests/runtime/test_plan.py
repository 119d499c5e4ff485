"""A plan is the graph in order, with every value freed behind its last reader."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from stator.loops.index import Index, Symbol
from stator.runtime.plan import (
    Allocation,
    Call,
    Constant,
    Free,
    Number,
    Plan,
    Require,
    Together,
    View,
    calls,
    loose_names,
    make_plan,
)
from tests.runtime.launches import launch

aten = torch.ops.aten


def call(graph: fx.Graph, name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node: fx.Node = graph.create_node("call_function", target, args, kwargs, name=name)
    return node


def plan_of(graph: fx.Graph, root: nn.Module | None = None) -> Plan:
    return make_plan(fx.GraphModule(root or nn.Module(), graph))


def lines(plan: Plan) -> list[str]:
    return [line.strip() for line in str(plan).splitlines()]


def diamond() -> fx.Graph:
    """(sin(x) * y, cos(sin(x)))"""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = call(graph, "a", aten.sin.default, x)
    b = call(graph, "b", aten.mul.Tensor, a, y)
    c = call(graph, "c", aten.cos.default, a)
    graph.output((b, c))
    return graph


def test_calls_stand_in_the_order_of_the_graph() -> None:
    plan = plan_of(diamond())

    assert [step.name for step in calls(plan)] == ["a", "b", "c"]
    assert [step.target for step in calls(plan)] == [
        aten.sin.default,
        aten.mul.Tensor,
        aten.cos.default,
    ]


def test_every_value_is_freed_behind_its_last_reader_and_outputs_never() -> None:
    assert lines(plan_of(diamond())) == [
        "plan(x, y)",
        "a = aten.sin.default(x)",
        "free x",
        "b = aten.mul.Tensor(a, y)",
        "free y",
        "c = aten.cos.default(a)",
        "free a",
        "return (b, c)",
    ]


def test_values_that_die_together_are_freed_together() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((call(graph, "a", aten.mul.Tensor, x, y),))

    (free,) = (step for step in plan_of(graph).steps if isinstance(step, Free))

    assert set(free.names) == {"x", "y"}


def test_an_input_that_nobody_reads_is_freed_at_once() -> None:
    graph = fx.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("unread")
    graph.output((call(graph, "a", aten.sin.default, x),))

    assert plan_of(graph).steps[0] == Free(("unread",))


def test_a_result_that_nobody_reads_is_freed_at_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call(graph, "a", aten.sin.default, x)
    graph.output((call(graph, "b", aten.cos.default, x),))

    assert lines(plan_of(graph))[1:3] == ["a = aten.sin.default(x)", "free a"]


def test_an_input_that_is_returned_is_never_freed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call(graph, "a", aten.sin.default, x)
    graph.output((x, x))

    freed = [name for step in plan_of(graph).steps if isinstance(step, Free) for name in step.names]

    assert freed == ["a"]


def test_a_value_read_inside_of_lists_and_keywords_lives_until_then() -> None:
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    a = call(graph, "a", aten.sin.default, x)
    b = call(graph, "b", aten.cat.default, [x, [y]], dim=0)
    c = call(graph, "c", aten.clamp.Tensor, a, min=z, max=b)
    graph.output((c,))

    assert lines(plan_of(graph)) == [
        "plan(x, y, z)",
        "a = aten.sin.default(x)",
        "b = aten.cat.default([x, [y]], dim=0)",
        "free x, y",
        "c = aten.clamp.Tensor(a, min=z, max=b)",
        "free a, z, b",
        "return (c,)",
    ]


def test_a_value_is_freed_once_however_often_it_is_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((call(graph, "a", aten.mul.Tensor, x, x),))

    assert [step for step in plan_of(graph).steps if isinstance(step, Free)] == [Free(("x",))]


def test_attributes_are_constants_found_by_their_path() -> None:
    root = nn.Module()
    root.inner = nn.Linear(2, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.create_node("get_attr", "inner.weight", name="weight")
    graph.output((call(graph, "a", aten.mm.default, x, weight),))

    constant, mm, free = plan_of(graph, root).steps

    assert isinstance(constant, Constant)
    assert constant.value is root.inner.weight
    assert str(constant) == "weight = constant Parameter"
    assert isinstance(mm, Call)
    assert str(free) == "free x, weight"


def test_a_graph_that_computes_nothing_is_an_empty_plan() -> None:
    graph = fx.Graph()
    graph.output((None, 3))

    assert plan_of(graph) == Plan((), (), (None, 3))
    assert str(plan_of(graph)) == "plan()\n  return (None, 3)"


def test_a_plan_calls_only_the_operators_of_the_graph() -> None:
    plan = plan_of(diamond())

    assert all(isinstance(step, Call | Free) for step in plan.steps)
    assert len(list(calls(plan))) == 3


# Steps of kernels


def test_a_launch_makes_its_allocations_and_takes_the_rest() -> None:
    step = launch("out", "x", "y")

    assert (step.makes, step.takes, step.writes) == (("out",), ("x", "y"), ())
    assert str(step) == "out = add(out, x, y, 100)"


def test_a_launch_into_an_input_makes_nothing() -> None:
    step = launch("", "g", writes=("p",))

    assert (step.makes, step.takes, step.writes) == ((), ("p", "g"), ("p",))
    assert str(step) == "negate(p, g, 100)"


def test_a_list_reads_as_its_launches() -> None:
    step = Together((launch("a", "x"), launch("b", "y")))

    assert str(step) == "together: a = negate(a, x, 100); b = negate(b, y, 100)"


def test_a_check_takes_its_flag() -> None:
    step = Require("flag", IndexError, "index out of range")

    assert (step.makes, step.takes, step.writes) == ((), ("flag",), ())
    assert str(step) == "require flag == 0: index out of range"


def test_a_number_follows_from_sizes() -> None:
    step = Number("n", 2 * Index.of(Symbol("size_s0")) + 1)

    assert (step.makes, step.takes, step.writes) == (("n",), (), ())
    assert str(step) == "n = 2*size_s0 + 1"


def test_views_that_begin_inside_are_loose() -> None:
    def view(name: str, source: str, start: int) -> View:
        made = Allocation(name, (Index.of(8),), (Index.of(1),), torch.bfloat16)
        return View(source, made, Index.of(start))

    steps = [view("even", "x", 8), view("odd", "x", 3), view("within", "odd", 8)]

    assert loose_names(steps, {"x"}) == {"odd", "within"}
