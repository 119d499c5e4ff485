"""Operators that change nothing: views in the same shape, copies that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from stator.graph.rules import why_not_same
from stator.graph.run import Ctx
from stator.graph.sharing import Sharing, is_returned

aten = torch.ops.aten

# They take nothing away and begin where their source does: the same layout is the same view.
VIEWS: Final = (
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.view.dtype,
    aten.expand.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


def drop_noops(graph: fx.Graph, ctx: Ctx) -> int:
    """Let readers of what changes nothing read its source; return how many were dropped.

    before: y = view(x, [2, 3]);  z = clone(y);  u = sin(z)    where x: f32[2, 3], contiguous
    after:  u = sin(x)

    What the caller gets stays: it must not become the very tensor it is a view or a copy of.
    """
    dropped = 0
    for target in VIEWS:
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if is_returned(node) or not _is_same(node, source) or not _spend(ctx, node):
                continue
            _drop(node, source)
            dropped += 1
    return dropped + _drop_copies(graph, ctx)


def _drop_copies(graph: fx.Graph, ctx: Ctx) -> int:
    found = [
        node
        for target in COPIES
        for node in graph.find_nodes(op="call_function", target=target, sort=False)
    ]
    sharing = Sharing(graph) if found else None
    dropped = 0
    for node in sorted(found):  # sources first: of a chain, each link is judged by what is left
        assert sharing is not None, "there is a copy"
        source = COPIES[node.target](*node.args, **node.kwargs)
        if not _is_same(node, source) or sharing.why_not_merge(node, source) is not None:
            continue
        if not _spend(ctx, node):
            continue
        sharing.merge(node, source)
        _drop(node, source)
        dropped += 1
    return dropped


def _spend(ctx: Ctx, node: fx.Node) -> bool:
    return ctx.fuel.spend(f"drop_noops: {node.name}")


def _drop(node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _is_same(node: fx.Node, source: Any) -> bool:
    """Whether both are strided tensors that agree in all but their values."""
    if not isinstance(source, fx.Node):
        return False
    values = (node.meta.get("val"), source.meta.get("val"))
    if not all(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in values):
        return False
    return why_not_same(node, source) is None


# What each copy is a copy of, if sizes and types are the same; None if that does not follow.


def _first(source: Any, *_: Any, **options: Any) -> Any:
    return source


def _unpinned(source: Any, *, pin_memory: bool = False, **options: Any) -> Any:
    return None if pin_memory else source


def _second(base: Any, source: Any, *_: Any, **options: Any) -> Any:
    return source if _has_sizes_of(source, base) else None


def _pad(source: Any, pads: Any, value: Any = 0) -> Any:
    return source if all(_is_int(pad, 0) for pad in pads) else None  # [1, -1] moves everything


def _power(source: Any, exponent: Any) -> Any:
    return source if isinstance(exponent, int | float) and exponent == 1 else None


def _whole_numbers(source: Any) -> Any:
    value = source.meta["val"]
    broken = value.dtype.is_floating_point or value.dtype.is_complex
    return None if broken else source


def _only(sources: Any, dim: int = 0) -> Any:
    return sources[0] if len(sources) == 1 else None


def _has_sizes_of(one: Any, other: Any) -> bool:
    values = (one.meta.get("val"), other.meta.get("val"))
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    first, second = ([_plain(size) for size in value.size()] for value in values)
    return first == second


def _plain(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_int(value: Any, wanted: int) -> bool:
    return isinstance(value, int) and value == wanted


COPIES: Final[dict[Any, Callable[..., Any]]] = {
    aten.clone.default: _first,
    aten.lift_fresh_copy.default: _first,
    aten.repeat.default: _first,
    aten._to_copy.default: _unpinned,
    aten.copy.default: _second,
    aten.slice_scatter.default: _second,  # of a slice as large as the whole: there is one
    aten.constant_pad_nd.default: _pad,
    aten.pow.Tensor_Scalar: _power,
    aten.round.default: _whole_numbers,
    aten.floor.default: _whole_numbers,
    aten.ceil.default: _whole_numbers,
    aten.trunc.default: _whole_numbers,
    aten.cat.default: _only,
}
