"""Softmax and layer norm, forward and backward, in rows."""

from __future__ import annotations

from typing import Any

import torch

from stator.loops.build import Body, cast
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import join
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


def _along(x: Value, dim: int, point: Point) -> Point:
    """The point without its coordinate in `dim`."""
    return tuple(i for d, i in enumerate(point) if d != dim)


def _reduce(t: Builder, x: Value, dim: int, combine: Combine, body: Any) -> Value:
    kept = [n for d, n in enumerate(x.size) if d != dim]
    return t.reduce(combine, kept, [x.size[dim]], lambda k, r: body(join(x.rank, [dim], k, r)))


@lowers(aten._softmax.default)
def softmax(t: Builder, result: Result, x: Value, dim: int, half_to_float: bool) -> Value | None:
    """exp(x - max) / sum(exp(x - max))"""
    if x.rank == 0:
        return None
    dim %= x.rank
    kind = x.dtype.computed_in
    top = _reduce(t, x, dim, Combine.MAX, lambda p: cast(x.load(p), kind))

    def shifted(point: Point) -> Expr:
        return _b.exp(_b.sub(cast(x.load(point), kind), top.load(_along(x, dim, point))))

    grown = t.keep(Value(x.size, kind, shifted))
    total = _reduce(t, x, dim, Combine.SUM, grown.load)
    return Value(
        result.size,
        result.dtype,
        lambda p: _b.div(grown.load(p), total.load(_along(x, dim, p))),
    )


@lowers(aten._log_softmax.default)
def log_softmax(
    t: Builder, result: Result, x: Value, dim: int, half_to_float: bool
) -> Value | None:
    """x - max - log(sum(exp(x - max)))"""
    if x.rank == 0:
        return None
    dim %= x.rank
    kind = x.dtype.computed_in
    top = _reduce(t, x, dim, Combine.MAX, lambda p: cast(x.load(p), kind))

    def shifted(point: Point) -> Expr:
        return _b.sub(cast(x.load(point), kind), top.load(_along(x, dim, point)))

    total = _reduce(t, x, dim, Combine.SUM, lambda p: _b.exp(shifted(p)))
    return Value(
        result.size,
        result.dtype,
        lambda p: _b.sub(shifted(p), _b.log(total.load(_along(x, dim, p)))),
    )


@lowers(aten._softmax_backward_data.default)
def softmax_backward(
    t: Builder, result: Result, grad: Value, out: Value, dim: int, dtype: Any
) -> Value | None:
    """out * (grad - sum(grad * out))"""
    if out.rank == 0:
        return None
    dim %= out.rank
    kind = grad.dtype.computed_in

    def product(point: Point) -> Expr:
        return _b.mul(cast(grad.load(point), kind), cast(out.load(point), kind))

    total = _reduce(t, out, dim, Combine.SUM, product)

    def load(point: Point) -> Expr:
        return _b.sub(
            product(point),
            _b.mul(cast(out.load(point), kind), total.load(_along(out, dim, point))),
        )

    return Value(result.size, result.dtype, load)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    t: Builder, result: Result, grad: Value, out: Value, dim: int, dtype: Any
) -> Value | None:
    """grad - exp(out) * sum(grad)"""
    if out.rank == 0:
        return None
    dim %= out.rank
    kind = grad.dtype.computed_in
    total = _reduce(t, out, dim, Combine.SUM, lambda p: cast(grad.load(p), kind))

    def load(point: Point) -> Expr:
        grown = _b.exp(cast(out.load(point), kind))
        return _b.sub(
            cast(grad.load(point), kind), _b.mul(grown, total.load(_along(out, dim, point)))
        )

    return Value(result.size, result.dtype, load)


@lowers(aten.native_layer_norm.default)
def layer_norm(
    t: Builder, result: tuple[Result, Result, Result], x: Value, shape: Any, *parameters: Any
) -> tuple[Value, Value, Value] | None:
    """(x - mean) / sqrt(var + eps) * weight + bias, the mean, and 1 / sqrt(var + eps)"""
    weight, bias, eps = parameters
    rows = x.rank - len(shape)
    inner = list(range(rows, x.rank))
    sizes = [x.size[d] for d in inner]
    count = 1.0
    for size in sizes:
        count *= size.constant or 0
    params = [value.dtype for value in (weight, bias) if value is not None]
    if count == 0 or x.dtype is not result[1].dtype or any(d is not x.dtype for d in params):
        return None  # mixed types: eager's statistics have a type of their own
    kind = x.dtype.computed_in
    kept = list(x.size[:rows])
    total = t.reduce(Combine.SUM, kept, sizes, lambda k, r: cast(x.load((*k, *r)), kind))
    mean = t.keep(Value(total.size, kind, lambda k: _b.div(total.load(k), count)))

    def apart(point: Point) -> Expr:
        return _b.sub(cast(x.load(point), kind), mean.load(point[:rows]))

    spread = t.reduce(Combine.SUM, kept, sizes, lambda k, r: _b.square(apart((*k, *r))))
    rstd = t.keep(
        Value(spread.size, kind, lambda k: _b.rsqrt(_b.add(_b.div(spread.load(k), count), eps)))
    )

    def load(point: Point) -> Expr:
        value = _b.mul(apart(point), rstd.load(point[:rows]))
        if weight is not None:
            value = _b.mul(value, cast(weight.load(point[rows:]), kind))
        if bias is not None:
            value = _b.add(value, cast(bias.load(point[rows:]), kind))
        return value

    ones = len(result[1].size) - rows
    assert ones >= 0, "mean and rstd keep a dimension of 1 for each normalized one"
    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, lambda p: mean.load(p[:rows])),
        Value(result[2].size, result[2].dtype, lambda p: rstd.load(p[:rows])),
    )
