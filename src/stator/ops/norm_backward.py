"""Layer norm's derivative: one pass in rows for the input, one in columns for the weights."""

from __future__ import annotations

from typing import Any

import torch

from stator.loops.build import Body, cast
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    t: Builder, result: tuple[Result, Result, Result], grad: Value, x: Value, *rest: Any
) -> tuple[Value, Value, Value] | None:
    """With g = grad * weight and n = (x - mean) * rstd, averages taken over a row:

    rstd * (g - mean(g) - n * mean(g * n)), sum of grad * n over rows, sum of grad over rows
    """
    shape, mean, rstd, weight, _, mask = rest
    rows = x.rank - len(shape)
    inner = list(x.size[rows:])
    kept = list(x.size[:rows])
    count = 1.0
    for size in inner:
        count *= size.constant or 0
    if not all(mask) or count == 0 or x.dtype.computed_in is not x.dtype:
        return None
    kind = x.dtype

    def row(point: Point) -> Point:
        return (*point[:rows], *(mean.size[rows:] and tuple(p * 0 for p in point[rows:])))

    def normal(point: Point) -> Expr:
        apart = _b.sub(cast(x.load(point), kind), mean.load(row(point)))
        return _b.mul(apart, rstd.load(row(point)))

    def weighted(point: Point) -> Expr:
        value = cast(grad.load(point), kind)
        return value if weight is None else _b.mul(value, cast(weight.load(point[rows:]), kind))

    plain = t.reduce(Combine.SUM, kept, inner, lambda k, r: weighted((*k, *r)))
    along = t.reduce(
        Combine.SUM,
        kept,
        inner,
        lambda k, r: _b.mul(weighted((*k, *r)), normal((*k, *r))),
    )

    def load(point: Point) -> Expr:
        outer = point[:rows]
        shift = _b.div(plain.load(outer), count)
        slope = _b.mul(normal(point), _b.div(along.load(outer), count))
        return _b.mul(rstd.load(row(point)), _b.sub(_b.sub(weighted(point), shift), slope))

    of_weight = t.reduce(
        Combine.SUM,
        inner,
        kept,
        lambda c, r: _b.mul(cast(grad.load((*r, *c)), kind), normal((*r, *c))),
    )
    of_bias = t.reduce(Combine.SUM, inner, kept, lambda c, r: cast(grad.load((*r, *c)), kind))
    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, of_weight.load),
        Value(result[2].size, result[2].dtype, of_bias.load),
    )
