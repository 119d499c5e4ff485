"""Views that change nothing: aliases, detached twins, views in the same shape."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from stator.graph.run import Ctx

aten = torch.ops.aten

VIEWS: Final = (
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.expand.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
)


def drop_noop_views(graph: fx.Graph, ctx: Ctx) -> int:
    """Let users of a view that changes nothing read its source; return how many.

    before: y = view(x, [2, 3])   where x: f32[2, 3], contiguous
    after:  y is gone, its users read x
    """
    dropped = 0
    for target in VIEWS:
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if not _same_layout(node, source) or _is_returned(node):
                continue
            if not ctx.fuel.spend(node.name):
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped += 1
    return dropped


def _is_returned(node: fx.Node) -> bool:
    """Whether the caller gets the view: it must not become the very tensor it is a view of."""
    return any(user.op == "output" for user in node.users)


def _same_layout(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (
        a.dtype == b.dtype
        and _numbers(a) is not None
        and _numbers(a) == _numbers(b)
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _numbers(value: torch.Tensor) -> tuple[object, ...] | None:
    """Size and stride as hashable expressions; comparing symbolic sizes must add no guard."""
    numbers = (*value.size(), None, *value.stride())
    return tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers)
