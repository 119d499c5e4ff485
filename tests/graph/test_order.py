"""Sorting keeps what it can of the order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from stator.graph.order import stable_topological_sort

aten = torch.ops.aten


def chain(graph: fx.Graph, sources: list[list[int]]) -> list[fx.Node]:
    nodes = [graph.placeholder("x")]
    for wanted in sources:
        args = tuple(nodes[index % len(nodes)] for index in wanted)
        nodes.append(graph.call_function(max, args))
    graph.output(nodes[-1])
    return nodes


def test_a_sorted_graph_stays_as_it_is() -> None:
    graph = fx.Graph()
    chain(graph, [[0], [1], [0, 2]])
    before = [node.name for node in graph.nodes]
    stable_topological_sort(graph)
    assert [node.name for node in graph.nodes] == before


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_order_becomes_a_valid_one(sources: list[list[int]], random: object) -> None:
    graph = fx.Graph()
    nodes = chain(graph, sources)[1:]
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis's Random
    first = next(iter(graph.nodes))
    for node in reversed(shuffled):
        first.append(node)

    stable_topological_sort(graph)

    graph.lint()
