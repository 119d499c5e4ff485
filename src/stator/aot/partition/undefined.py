"""Backward graphs for the tangents that are there: unused outputs bring none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from stator.graph.edit import drop_unread, reached_from

aten = torch.ops.aten


def without_tangents(graph: fx.Graph, undefined: Collection[fx.Node]) -> None:
    """Remove all that follows from `undefined` placeholders alone, as eager would not run it.

    before: g = add(a, b); a depends on an undefined tangent, b on a defined one
    after:  g is b

    Where another operator mixes both, the undefined side becomes zeros; if its size is symbolic, it
    is computed from a tangent of zeros.  A gradient of undefined tangents alone is None.
    """
    missing: set[fx.Node] = set(undefined)
    for node in list(graph.nodes):
        absent = [source for source in node.all_input_nodes if source in missing]
        if not absent or node.op == "output":
            continue
        if not _has_other_tangent(node, missing):
            missing.add(node)
        elif (rest := _other_summand(node, missing)) is not None:
            node.replace_all_uses_with(rest)
        else:
            for source in absent:
                node.replace_input_with(source, _zeros(graph, source, node))
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(None if grad in missing else grad for grad in output.args[0]),)
    drop_unread(graph)


def mark_tangents(graph: fx.Graph, tangents: Collection[fx.Node]) -> None:
    """Note on every node whether it depends on a tangent."""
    reached = reached_from(tangents, graph)
    for node in graph.nodes:
        node.meta["depends_on_tangent"] = node in reached


def _other_summand(node: fx.Node, missing: set[fx.Node]) -> fx.Node | None:
    """What is left of a sum of two gradients without the missing one; None if it is no such sum."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    rest = [source for source in node.all_input_nodes if source not in missing]
    if len(node.args) != 2 or len(rest) != 1 or node.args[0] is node.args[1]:
        return None
    ours, whole = rest[0].meta["val"], node.meta["val"]
    same = ours.dtype == whole.dtype and _sizes(ours) == _sizes(whole)
    return rest[0] if same else None


def _sizes(value: torch.Tensor) -> list[object]:
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in value.size()]


def _has_other_tangent(node: fx.Node, missing: set[fx.Node]) -> bool:
    return any(
        source.meta["depends_on_tangent"] and source not in missing
        for source in node.all_input_nodes
    )


def _zeros(graph: fx.Graph, like: fx.Node, user: fx.Node) -> fx.Node:
    """Zeros in the shape of `like`, whose own tangent is undefined."""
    value: Any = like.meta["val"]
    if any(isinstance(size, torch.SymInt) for size in value.size()):
        return like
    with graph.inserting_before(user):
        zeros = graph.call_function(
            aten.full.default,
            (list(value.size()), 0),
            {"dtype": value.dtype, "device": value.device},
        )
    zeros.meta["val"] = value
    zeros.meta["depends_on_tangent"] = False
    return zeros
