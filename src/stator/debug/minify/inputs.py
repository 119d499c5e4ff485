"""A strategy that lets one input stand for several that are of one kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from stator.debug.minify.case import Case, as_module
from stator.debug.minify.search import Search


def consolidate_inputs(search: Search, granularity: int) -> Iterator[Case | None]:
    """Inputs that are alike become the first of them: all at once, then one by one."""
    del granularity
    case = search.case
    first: dict[object, fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node, value in zip(case.placeholders, case.inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        kind = (value.dtype, value.size(), value.stride(), value.requires_grad)
        if kind in first:
            twins[node] = first[kind]
        first.setdefault(kind, node)
    if len(twins) > 1:
        yield without(case, twins)
    for node, twin in twins.items():
        yield without(case, {node: twin})


def without(case: Case, twins: dict[fx.Node, fx.Node]) -> Case:
    """The case without some inputs, for which others stand."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in case.graph.nodes:
        if node.op == "output":
            graph.output(tuple(made[source] for source in case.outputs))
        elif node in twins:
            made[node] = made[twins[node]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    pairs = zip(case.placeholders, case.inputs, strict=True)
    values = tuple(value for node, value in pairs if node not in twins)
    return Case(as_module(case.module, graph), values)
