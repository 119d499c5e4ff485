"""Effects, unread values, and what depends on what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from stator.graph.edit import drop_unread, is_effect, needed_by, reached_from
from tests.aot import custom_operators as custom_operators  # registers them

aten = torch.ops.aten


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call of an operator, under the operator's name."""
    node: fx.Node = graph.create_node("call_function", target, args, name=target._opname)
    return node


def names(nodes: Any) -> set[str]:
    return {node.name for node in nodes}


def diamond() -> dict[str, fx.Node]:
    """x -> sin -> (cos, tan) -> mul;  y -> neg, which nobody reads."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sin = call(graph, aten.sin.default, x)
    cos, tan = call(graph, aten.cos.default, sin), call(graph, aten.tan.default, sin)
    mul = call(graph, aten.mul.Tensor, cos, tan)
    call(graph, aten.neg.default, y)
    graph.output((mul,))
    return {node.name: node for node in graph.nodes}


# Effects


def asserting(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten._assert_async.msg, x, "must hold")


def asserting_functionally(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten._functional_assert_async.msg, x, "must hold", x)


def asserting_a_number(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten._functional_assert_scalar.default, True, "must hold", x)


def checking(graph: fx.Graph, x: fx.Node) -> fx.Node:
    node = call(graph, aten._linalg_check_errors.default, x, "linalg.inv")
    node.kwargs = {"is_matrix": True}
    return node


def writing_down(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, torch.ops.stator_test.write_down.default, "sum", x)


def marked(graph: fx.Graph, x: fx.Node) -> fx.Node:
    node = call(graph, aten.cos.default, x)
    node.meta["effect"] = True  # as the calls that had a token
    return node


def updating_an_input(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, aten.copy_.default, x, x)


EFFECTS = [
    asserting,
    asserting_functionally,
    asserting_a_number,
    checking,
    writing_down,
    marked,
    updating_an_input,
]


@pytest.mark.parametrize("make", EFFECTS)
def test_what_does_something_is_an_effect(make: Callable[..., fx.Node]) -> None:
    graph = fx.Graph()

    assert is_effect(make(graph, graph.placeholder("x")))


def test_what_computes_something_is_none() -> None:
    assert not any(is_effect(node) for node in diamond().values())


@pytest.mark.parametrize("make", EFFECTS)
def test_an_effect_stays_though_nobody_reads_it(make: Callable[..., fx.Node]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    # What an effect reads stays with it.
    effect = make(graph, call(graph, aten.sin.default, x))
    graph.output((x,))

    drop_unread(graph)

    assert effect in graph.nodes
    assert len(graph.find_nodes(op="call_function", target=aten.sin.default)) == 1


# Unread values


def test_chains_that_nobody_reads_are_erased_to_their_beginning() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    dead = call(graph, aten.sin.default, y)
    for _ in range(3):
        dead = call(graph, aten.cos.default, dead)
    kept = call(graph, aten.neg.default, x)
    graph.output((kept,))

    drop_unread(graph)

    assert [node.name for node in graph.nodes] == ["x", "y", "neg", "output"]


def test_what_is_read_stays() -> None:
    nodes = diamond()
    graph = nodes["x"].graph

    drop_unread(graph)

    assert names(graph.nodes) == set(nodes) - {"neg"}


def test_an_unread_attribute_is_erased() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.create_node("get_attr", "weight")
    graph.output((x,))

    drop_unread(graph)

    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


# Dependence


def test_a_value_needs_itself_and_all_it_is_computed_from() -> None:
    nodes = diamond()

    assert names(needed_by([nodes["mul"]])) == {"x", "sin", "cos", "tan", "mul"}
    assert names(needed_by([nodes["cos"], nodes["y"]])) == {"x", "sin", "cos", "y"}


def test_nothing_needs_nothing() -> None:
    assert needed_by([]) == set()


def test_a_long_chain_is_followed_to_its_end() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5000):  # deeper than Python's stack
        value = call(graph, aten.sin.default, value)

    assert len(needed_by([value])) == 5001


def test_a_value_reaches_itself_and_all_that_is_computed_from_it() -> None:
    nodes = diamond()
    graph = nodes["x"].graph

    assert names(reached_from([nodes["cos"]], graph)) == {"cos", "mul", "output"}
    assert names(reached_from([nodes["y"]], graph)) == {"y", "neg"}
    assert reached_from([], graph) == set()
