"""Arithmetic with constants becomes part of the weight and bias of the product before it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import fx

from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.passes.freezing.affine import (
    ADD,
    ARITHMETIC,
    CAST,
    DIV,
    MUL,
    SUB,
    Affine,
    Product,
    fold,
    is_cast,
)
from stator.passes.freezing.drop_casts import Trip, drop
from stator.passes.freezing.fold_batch_norm import fold_batch_norm
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

REVERSED: Final = (aten.rsub.Tensor, aten.rsub.Scalar)


def fold_binary(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions and products compute what constants do to their results; return how many.

    before: y = mul(convolution(x, w, b), c) + 1         w, b, c: weights
    after:  y = convolution(x, w * c, b * c + 1)

    Batch norms that now follow a product at once are folded, too, and so on.
    """
    folded, found = 0, _sweep(graph, ctx)
    while found:
        folded += found
        found = 0
        if "fold_batch_norm" not in ctx.options.skip and fold_batch_norm(graph, ctx):
            found = _sweep(graph, ctx)
    return folded + _drop_trips(graph, ctx)


def _drop_trips(graph: fx.Graph, ctx: Ctx) -> int:
    """Drop casts around arithmetic, or a batch norm, that is folded by now; return how many."""
    dropped, settled = 0, constant_nodes(graph)
    for node in graph.find_nodes(op="call_function", target=CAST):
        trip = Trip.to(node) if is_cast(node) else None
        product = None if trip is None else Product.behind(trip.out)
        if trip is None or product is None or product.node in settled:
            continue
        if product.why_not(settled) is None and trip.why_not_dropped() is None:
            dropped += drop(trip, ctx) is None
    drop_unread(graph)
    return dropped


def _sweep(graph: fx.Graph, ctx: Ctx) -> int:
    """Fold all that can be, in the order of the graph: links of a chain one after the other."""
    folded, settled = 0, constant_nodes(graph)
    if not settled:
        return 0
    for node in [node for node in graph.nodes if node.target in ARITHMETIC]:
        operands = _operands(node, settled)
        if operands is None:
            continue
        product, constant = operands
        reason = _fold(node, product, constant, settled, ctx)
        said = "is folded" if reason is None else f"not folded: {reason}"
        if (text := f"{node.name} {said}") not in ctx.record.notes:
            ctx.record.notes.append(text)
        if reason is None:
            folded += 1
    drop_unread(graph)
    return folded


def _operands(node: fx.Node, settled: Collection[fx.Node]) -> tuple[Product, Any] | None:
    """A product and a constant, if the node computes with such."""
    for this, other in (node.args[:2], node.args[1::-1]):
        product = Product.behind(this)
        is_constant = isinstance(other, int | float) or other in settled
        if product is not None and product.node not in settled and is_constant:
            return product, other
    return None


def _fold(
    node: fx.Node, product: Product, constant: Any, settled: dict[fx.Node, None], ctx: Ctx
) -> str | None:
    """None if the arithmetic is now part of the product; otherwise the reason."""
    is_left = node.args[0] is product.read
    if (node.target in (*SUB, *DIV) and not is_left) or node.target in REVERSED:
        return f"{product.node.name} is on the right of it"
    alpha = node.kwargs.get("alpha", 1)
    reason = product.why_not(settled) or _why_not(node, product, constant)
    if reason is None and (node.target in (*MUL, *DIV) or not is_left):
        factor = alpha if node.target in ADD else _factor(node.target, constant)
        reason = product.why_not_scaled() or product.why_not_in_range(factor)
    if reason is not None:
        return reason
    return fold(product, node, _affine(node.target, alpha, is_left), [constant], settled, ctx)


def _why_not(node: fx.Node, product: Product, constant: Any) -> str | None:
    """None if the constant has one number for every channel that can be folded."""
    if not isinstance(constant, fx.Node):
        return _why_not_number(node, float(constant), product.node.meta["val"].dtype)
    sizes = constant.meta["val"].size()
    missing = product.read.meta["val"].dim() - len(sizes)
    axes = [axis + missing for axis, size in enumerate(sizes) if size != 1]
    if len(axes) > 1 or not all(axis >= 0 and product.has_channels(axis) for axis in axes):
        return f"{constant.name} has more than one number for every channel"
    return None


def _why_not_number(node: fx.Node, number: float, dtype: torch.dtype) -> str | None:
    if node.target in DIV:
        if number == 0:
            return "it divides by zero"
        number = 1 / number
    if not math.isfinite(number) or abs(number) > torch.finfo(dtype).max:
        return f"{number} is too large"
    return None


def _factor(target: Any, constant: Any) -> float | None:
    """What a product is multiplied by; None if it is a tensor."""
    if isinstance(constant, fx.Node):
        return None
    return 1 / constant if target in DIV else float(constant)


def _affine(target: Any, alpha: Any, is_left: bool) -> Affine:
    """Factor and summand that an operator with a constant means."""

    def times(value: Any, number: Any) -> Any:
        return value if number == 1 else value * number

    def affine(constant: Any) -> tuple[Any, Any]:
        if target in MUL:
            return constant, None
        if target in DIV:
            return _inverse(constant), None
        if target in SUB:
            return None, times(-constant, alpha)
        if is_left:
            return None, times(constant, alpha)
        return (None if alpha == 1 else alpha), constant

    return affine


def _inverse(constant: Any) -> Any:
    return 1 / constant if isinstance(constant, int | float) else aten.reciprocal.default(constant)
