"""Who shares memory with whom, and when a copy may go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.graph.sharing import Sharing, is_returned, written_by

aten = torch.ops.aten


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    module: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    return module.graph


def only(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


REASONS: dict[str, tuple[Callable[..., Any], str | None]] = {
    "read": (lambda x: aten.clone(x) + 1, None),
    "returned": (lambda x: aten.clone(x), "the caller gets it"),
    "a view returned": (lambda x: aten.view(aten.t(aten.clone(x)), [-1]), "the caller gets it"),
    "a part returned": (lambda x: aten.split(aten.clone(x), 1)[0], "the caller gets it"),
    "read by addresses": (
        lambda x: aten.as_strided(aten.clone(x), [1], [1], 0) + 1,
        "its memory is read by addresses, which another memory has not",
    ),
    "source written": (
        lambda x: (c := aten.clone(x), aten.copy_(x, aten.sin(x)), c + 1)[2],
        "it is written to",
    ),
}


@pytest.mark.parametrize(("fn", "reason"), REASONS.values(), ids=REASONS.keys())
def test_why_a_copy_stays(fn: Callable[..., Any], reason: str | None) -> None:
    graph = graph_of(fn, torch.randn(2, 1))
    copy = only(graph, aten.clone.default)

    assert Sharing(graph).why_not_merge(copy, copy.args[0]) == reason


def test_views_share_and_results_do_not() -> None:
    graph = graph_of(lambda x: aten.sin(aten.t(x)) + 1, torch.randn(2, 3))
    sharing = Sharing(graph)
    (x,) = graph.find_nodes(op="placeholder")

    assert sharing.memory(only(graph, aten.t.default)) is sharing.memory(x)
    assert sharing.memory(only(graph, aten.sin.default)) is not sharing.memory(x)


def test_what_the_backward_reads_of_the_caller_s_memory_stays_a_copy() -> None:
    graph = graph_of(lambda x: aten.cos(aten.sin(aten.clone(x))) * 2, torch.randn(3))
    copy, sin = only(graph, aten.clone.default), only(graph, aten.sin.default)
    copy.meta["in_forward"] = True  # and the sine is of the backward

    assert Sharing(graph).why_not_merge(copy, copy.args[0]) is not None
    sin.meta["in_forward"] = True
    assert Sharing(graph).why_not_merge(copy, copy.args[0]) is None


def test_what_was_merged_is_one_memory() -> None:
    graph = graph_of(lambda x: (aten.clone(aten.clone(x)),), torch.randn(3))
    first, second = graph.find_nodes(op="call_function", target=aten.clone.default)
    sharing = Sharing(graph)
    assert not sharing.is_returned(first)

    sharing.merge(second, first)

    assert sharing.is_returned(first)
    assert is_returned(second)


def test_an_update_writes_to_its_input_alone() -> None:
    graph = graph_of(lambda x, y: aten.copy_(x, y), torch.randn(3), torch.randn(3))
    x, y = graph.find_nodes(op="placeholder")
    sharing = Sharing(graph)

    assert written_by(only(graph, aten.copy_.default)) == [x]
    assert sharing.is_written(x)
    assert not sharing.is_written(y)
