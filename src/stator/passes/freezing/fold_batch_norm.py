"""Batch norms of inference become part of the weight and bias of what stands before them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import fx

from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.passes.freezing.affine import Affine, Product, fold
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

INFERENCE: Final = aten._native_batch_norm_legit_no_training.default
NORMS: Final = (
    INFERENCE,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)


def fold_batch_norm(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions and products normalize their results; return how many do.

    before: y = batch_norm(convolution(x, w, b), gamma, beta, mean, var)      w, b, …: weights
    after:  y = convolution(x, w * s, (b - mean) * s + beta)    s = gamma / sqrt(var + eps)
    """
    folded, settled = 0, constant_nodes(graph)
    if not settled:
        return 0
    for node in [node for node in graph.nodes if node.target in NORMS]:
        reason = _fold(node, settled, ctx)
        said = "is folded" if reason is None else f"not folded: {reason}"
        if (text := f"{node.name} {said}") not in ctx.record.notes:
            ctx.record.notes.append(text)
        if reason is None:
            graph.erase_node(node)
            folded += 1
    drop_unread(graph)
    return folded


def _fold(node: fx.Node, settled: dict[fx.Node, None], ctx: Ctx) -> str | None:
    """None if the norm is now part of what stands before it; otherwise the reason."""
    product = Product.behind(node.args[0])
    if product is None:
        return "it follows neither a convolution nor a product"
    if reason := product.why_not(settled) or product.why_not_scaled() or _why_not(node, settled):
        return reason
    if not product.has_channels(1):
        return f"its channels are not those of {product.node.name}"
    if reason := product.why_not_in_range(None):
        return reason
    (result,) = node.users
    return fold(product, result, _normalized(node.args[-1]), node.args[1:5], settled, ctx)


def _why_not(node: fx.Node, settled: Collection[fx.Node]) -> str | None:
    if node.target is not INFERENCE:
        return "it normalizes with the statistics of its input, or changes those it keeps"
    if any(one is not None and one not in settled for one in node.args[1:5]):
        return "what it normalizes with is no constant"
    parts = [(user.target, user.args[1]) for user in node.users]
    if parts != [(operator.getitem, 0)]:
        return "more is read of it than its result"
    return None


def _normalized(eps: Any) -> Affine:
    def affine(gamma: Any, beta: Any, mean: Any, var: Any) -> tuple[Any, Any]:
        factor = aten.rsqrt.default(var + eps)
        factor = factor if gamma is None else factor * gamma
        shift = mean * factor
        return factor, -shift if beta is None else beta - shift

    return affine
