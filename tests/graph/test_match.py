"""Patterns: each kind of node, each rule of matching."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from stator.graph.match import (
    MULTIPLE,
    Arg,
    CallFunction,
    CallFunctionVarArgs,
    CallMethod,
    CallModule,
    ExclusiveKeywordArg,
    Ignored,
    KeywordArg,
    ListOf,
    Match,
    MultiOutputPattern,
    Pattern,
    RepeatedExpr,
    find_match,
    is_same,
)
from tests.rules.tracing import traced

aten = torch.ops.aten
X, Y = KeywordArg("x"), KeywordArg("y")


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def last(module: fx.GraphModule, target: Any) -> fx.Node:
    return list(module.graph.find_nodes(op="call_function", target=target))[-1]


def found(pattern: Pattern, program: Callable[..., Any], *inputs: Tensor) -> Match | None:
    """The first match of `pattern` in the graph of `program`, from its end."""
    module = traced(program, *inputs)
    for node in reversed(list(module.graph.nodes)):
        result = find_match(pattern, node)
        if result is not None:
            return result
    return None


def test_names_are_bound_and_nodes_listed_in_order() -> None:
    pattern = CallFunction(aten.add.Tensor, CallFunction(aten.mm.default, X, Y), KeywordArg("b"))
    result = found(pattern, lambda x, y, b: x @ y + b, rand(3, 4), rand(4, 5), rand(5))

    assert result is not None
    assert {name: node.name for name, node in result.kwargs.items()} == {
        "x": "x_1",
        "y": "y_1",
        "b": "b_1",
    }
    assert [node.target for node in result.nodes] == [aten.mm.default, aten.add.Tensor]
    assert result.output_node() is result.nodes[-1]


def test_operands_that_may_be_exchanged_are() -> None:
    pattern = CallFunction(aten.add.Tensor, CallFunction(aten.mm.default, X, Y), KeywordArg("b"))
    assert found(pattern, lambda x, y, b: b + x @ y, rand(3, 4), rand(4, 5), rand(5))


def test_operands_are_not_exchanged_where_one_has_a_factor() -> None:
    pattern = CallFunction(
        aten.add.Tensor, CallFunction(aten.sin.default, X), KeywordArg("b"), alpha=2
    )
    assert found(pattern, lambda x, b: torch.add(x.sin(), b, alpha=2), rand(3), rand(3))
    assert not found(pattern, lambda x, b: torch.add(b, x.sin(), alpha=2), rand(3), rand(3))


def test_a_packet_stands_for_any_overload() -> None:
    pattern = CallFunction(aten.sum, X, Ignored())
    assert found(CallFunction(aten.sum, X), lambda x: x.sum(), rand(3))
    assert not found(pattern, lambda x: x.sum(), rand(3))


def test_defaults_are_filled_in_on_both_sides() -> None:
    pattern = CallFunction(aten.softmax.int, X, -1)
    wanted = CallFunction(aten._softmax.default, X, -1, False)
    assert found(wanted, lambda x: torch.softmax(x, -1), rand(3, 4))
    assert not found(pattern, lambda x: torch.softmax(x, -1), rand(3, 4))
    scatter = CallFunction(aten.sum.dim_IntList, X, [1], False)
    assert found(scatter, lambda x: x.sum(1), rand(3, 4))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        (torch.float32, torch.float32, True),
        (None, 0, False),
    ],
)
def test_constants_are_the_same_or_not(one: Any, other: Any, same: bool) -> None:
    assert is_same(one, other) is same


def test_a_name_twice_is_one_value() -> None:
    pattern = CallFunction(aten.mul.Tensor, X, CallFunction(aten.sigmoid.default, X))
    assert found(pattern, lambda x: x * x.sigmoid(), rand(3))
    assert not found(pattern, lambda x, y: y * x.sigmoid(), rand(3), rand(3))


def test_a_pattern_twice_is_one_node() -> None:
    inner = CallFunction(aten.exp.default, X, _users=2)
    pattern = CallFunction(aten.div.Tensor, inner, CallFunction(aten.sum.default, inner))

    def once(x: Tensor) -> Tensor:
        e = x.exp()
        return e / e.sum()

    assert found(pattern, once, rand(3))
    assert not found(pattern, lambda x: x.exp() / x.exp().sum(), rand(3))


def test_two_nodes_of_a_pattern_are_two_nodes_of_the_graph() -> None:
    pattern = CallFunction(
        aten.add.Tensor,
        CallFunction(aten.exp.default, X, _users=MULTIPLE),
        CallFunction(aten.exp.default, Y, _users=MULTIPLE),
    )

    def twice(x: Tensor) -> Tensor:
        e = x.exp()
        return e + e

    assert not found(pattern, twice, rand(3))
    assert found(pattern, lambda x, y: x.exp() + y.exp(), rand(3), rand(3))


def test_exclusive_names_are_never_one_node() -> None:
    plain = CallFunction(aten.mul.Tensor, KeywordArg("a"), KeywordArg("b"))
    exclusive = CallFunction(aten.mul.Tensor, ExclusiveKeywordArg("a"), ExclusiveKeywordArg("b"))
    assert found(plain, lambda x: x * x, rand(3))
    assert not found(exclusive, lambda x: x * x, rand(3))
    assert found(exclusive, lambda x, y: x * y, rand(3), rand(3))


def test_readers_outside_forbid_a_match_unless_they_may_be() -> None:
    def program(x: Tensor) -> Any:
        y = x.sin()
        return y.cos(), y

    assert not found(
        CallFunction(aten.cos.default, CallFunction(aten.sin.default, X)), program, rand(3)
    )
    inner = CallFunction(aten.sin.default, X, _users=MULTIPLE)
    assert found(CallFunction(aten.cos.default, inner), program, rand(3))


def test_positional_arguments_and_those_of_any_number() -> None:
    result = found(
        CallFunction(aten.sub.Tensor, Arg(), Arg()), lambda x, y: x - y, rand(3), rand(3)
    )
    assert result is not None
    assert [node.name for node in result.args] == ["x_1", "y_1"]
    result = found(CallFunctionVarArgs(aten.sub.Tensor), lambda x, y: x - y, rand(3), rand(3))
    assert result is not None
    assert len(result.args) == 2


def test_lists_match_all_or_some_of_their_elements() -> None:
    sin = CallFunction(aten.sin.default, Ignored())
    every, some = (
        CallFunction(aten.cat.default, ListOf(sin)),
        CallFunction(aten.cat.default, ListOf(sin, partial=True)),
    )

    def one(x: Tensor) -> Tensor:
        return torch.cat([x.sin()])

    def mixed(x: Tensor) -> Tensor:
        return torch.cat([x.sin(), x])

    assert found(every, one, rand(3))
    assert not found(every, mixed, rand(3))
    assert found(some, mixed, rand(3))


def test_what_is_repeated_belongs_to_the_match() -> None:
    split = CallFunction(aten.split.Tensor, X, Ignored(), _users=MULTIPLE)
    part = RepeatedExpr(CallFunction(getitem, split, Ignored()))
    pattern = CallFunction(aten.cos.default, part)

    def program(x: Tensor) -> Any:
        a, b = x.split(2)
        return a.cos(), b.sin()

    result = found(pattern, program, rand(4))
    assert result is not None
    assert sum(node.target is getitem for node in result.nodes) == 2


def test_several_outputs_are_found_from_what_the_first_bound() -> None:
    product = CallFunction(aten.mm.default, X, Y, _users=2)
    pattern = MultiOutputPattern(
        [CallFunction(aten.sin.default, product), CallFunction(aten.cos.default, product)]
    )

    def program(x: Tensor, y: Tensor) -> Any:
        z = x @ y
        return z.cos(), z.sin()

    result = found(pattern, program, rand(3, 3), rand(3, 3))
    assert result is not None
    assert [node.target for node in result.outputs if node] == [aten.sin.default, aten.cos.default]
    assert not found(pattern, lambda x, y: ((x @ y).sin(), (x @ y).cos()), rand(3, 3), rand(3, 3))


def test_no_match_reaches_over_a_write() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sin = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.copy_.default, (x, y))
    cos = graph.call_function(aten.cos.default, (sin,))
    graph.output(cos)
    assert (
        find_match(CallFunction(aten.cos.default, CallFunction(aten.sin.default, X)), cos) is None
    )


def test_a_pattern_may_hold_the_write_itself() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sin = graph.call_function(aten.sin.default, (y,))
    copy = graph.call_function(aten.copy_.default, (x, sin))
    cos = graph.call_function(aten.cos.default, (copy,))
    graph.output(cos)
    write = CallFunction(aten.copy_.default, X, CallFunction(aten.sin.default, Y))
    assert find_match(CallFunction(aten.cos.default, write), cos) is not None


def test_methods_and_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).relu()

    module = fx.symbolic_trace(Model())
    (node,) = module.graph.find_nodes(op="call_method", target="relu")
    assert find_match(CallMethod("relu", CallModule(nn.Linear, X)), node) is not None
    assert find_match(CallMethod("relu", CallModule(nn.Conv2d, X)), node) is None
