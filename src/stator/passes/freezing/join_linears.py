"""Products of one input with several weights become one product with all of them.

One wide product starts the library once.  Its parts are columns, which lie apart from row to row; a
copy of them would cost what is won.  Three products with 256 to 1024 columns each, joined, took
0.70 to 0.93 of their time with 1 to 64 rows, 0.81 to 0.98 with 128 and 256; two with 5632 columns
0.97 to 1.00 (packed by MKL; a busy machine, so a first estimate).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from stator.graph.build import Builder
from stator.graph.rules import layout_of
from stator.graph.run import Ctx
from stator.passes.freezing.affine import Product, hoist, why_not_kept, writer_between
from stator.passes.freezing.take_constants import constant_nodes
from stator.torch_api import OpOverload, detect_fake_mode, is_view_op, pytree

aten = torch.ops.aten

PRODUCTS: Final = (aten.mm.default, aten.addmm.default)
RESHAPES: Final = (aten.view.default, aten._unsafe_view.default)
WANT_ROWS: Final = frozenset({*PRODUCTS, aten.convolution.default})  # libraries pack for them
FEW_ROWS: Final = 256  # with more, multiplying is all that counts


def join_linears(graph: fx.Graph, ctx: Ctx) -> int:
    """Multiply by several weights at once; return how many products were joined.

    before: q = mm(x, u);  k = mm(x, v)                           u, v: weights
    after:  y = mm(x, cat([u, v], 1));  q = slice(y, 1, 0, 4);  k = slice(y, 1, 4, 8)
    """
    joined, settled = 0, constant_nodes(graph)
    if not settled:
        return 0
    for group in _groups(graph, settled):
        members = [product for product in group if _may_join(product, settled, ctx)]
        if len(members) < 2:
            continue
        names = ", ".join(product.node.name for product in members)
        reason = _why_not(members) or _join(members, f"join_linears: {names}", ctx)
        said = "are joined" if reason is None else f"not joined: {reason}"
        ctx.record.notes.append(f"{names} {said}")
        joined += 0 if reason is not None else len(members)
    return joined


def _groups(graph: fx.Graph, settled: Collection[fx.Node]) -> list[list[Product]]:
    """Products of the same kind that read the same input, in order."""
    groups: dict[Any, list[Product]] = {}
    for node in (one for one in graph.nodes if one.target in PRODUCTS and one not in settled):
        source, sizes = node.args[-2], layout_of(node.args[-2].meta["val"])
        while source.target in RESHAPES:  # each linear has a view of its own
            source = source.args[0]
        groups.setdefault((node.target, source, sizes), []).append(Product(node, node))
    return [group for group in groups.values() if len(group) > 1]


def _may_join(product: Product, settled: Collection[fx.Node], ctx: Ctx) -> bool:
    """Whether a product may be computed with others; if not, the reason is noted."""
    reason = product.why_not_settled(settled) or product.why_not_scaled()
    bias = product.bias
    if bias is not None and bias.meta["val"].size() != (product.channels,):
        reason = reason or "its bias is not one number for every column"
    if reason is not None:
        ctx.record.notes.append(f"{product.node.name} not joined: {reason}")
    return reason is None


def _why_not(members: Sequence[Product]) -> str | None:
    """None if one product should be faster; otherwise the reason, for the log."""
    rows = members[0].node.meta["val"].size(0)
    if not isinstance(rows, int):
        return "how many rows there are is not known"
    if rows > FEW_ROWS:
        return f"with {rows} rows it is no faster"
    writer = writer_between(members[0].node, members[-1].node)
    return None if writer is None else f"{writer.name} writes in between"


def _join(members: Sequence[Product], what: str, ctx: Ctx) -> str | None:
    """Let the members be parts of one product; the reason, if they may not."""
    first, graph = members[0].node, members[0].node.graph
    weights = [product.weight for product in members]
    biases = [product.bias for product in members if product.bias is not None]
    builder = Builder(graph, members[-1].node)
    bounds = [0, *accumulate(product.channels for product in members)]
    joined, *parts = builder.run(_joined, first.args[-2], weights, biases, bounds)
    values = {one.node: part.meta["val"] for one, part in zip(members, parts, strict=True)}
    fresh, reason = _lying_otherwise(values, graph)
    made = [node for node in builder.added if node not in (joined, *parts)]
    reason = reason or why_not_kept(made, what, ctx)
    if reason is not None:
        builder.take_back()
        return reason
    hoist(parts, first)
    for product, part in zip(members, parts, strict=True):
        product.node.replace_all_uses_with(part)
        graph.erase_node(product.node)
    for node, value in fresh.items():
        node.meta["val"] = value
    return None


def _joined(x: Any, weights: list[Any], biases: list[Any], bounds: list[int]) -> list[Any]:
    """The product, and its parts."""
    if all(weight.value.stride()[0] == 1 for weight in weights):  # the library reads it by rows
        weight = aten.t.default(aten.cat.default([aten.t.default(one) for one in weights]))
    else:
        weight = aten.cat.default(weights, 1)
    total = [aten.cat.default(biases)] if biases else []
    product = (aten.addmm if biases else aten.mm).default(*total, x, weight)
    return [product, *(aten.slice.Tensor(product, 1, *ends) for ends in pairwise(bounds))]


def _lying_otherwise(
    parts: Mapping[fx.Node, Any], graph: fx.Graph
) -> tuple[dict[fx.Node, torch.Tensor], str | None]:
    """Views of parts as they will lie; the reason, if somebody wants a part in one piece."""
    fresh, views = dict(parts), {}
    mode = detect_fake_mode(list(parts.values()))
    for node in graph.nodes:
        if node in fresh or all(source not in fresh for source in node.all_input_nodes):
            continue
        if node.target in WANT_ROWS or not isinstance(node.target, OpOverload):
            who = "the caller" if node.op == "output" else node.name
            return {}, f"{who} gets a part, and wants it in one piece"
        given = map_arg((node.args, node.kwargs), lambda one: fresh.get(one, one.meta["val"]))
        try:
            with mode, torch.no_grad():
                value = node.target(*given[0], **given[1])
        except (RuntimeError, ValueError):
            return {}, f"{node.name} is a view of a part, which has to be in one piece"
        if _layouts(value) == _layouts(node.meta["val"]):
            continue
        if not is_view_op(node.target) and node.target is not aten._unsafe_view.default:
            return {}, f"{node.name} reads a part, and would lie otherwise itself"
        fresh[node] = views[node] = value
    return views, None


def _layouts(value: Any) -> list[Any]:
    return [layout_of(one) for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
