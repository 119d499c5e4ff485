"""Softmax, forward and backward, and layer norm, in rows."""

from __future__ import annotations

from typing import Any

import torch

from stator.loops.build import Body, cast
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import dim_of
from stator.ops.reduce import count_of, join, over, read_twice
from stator.ops.table import lowers
from stator.ops.variance import inverse_deviation, moments

aten = torch.ops.aten
_b = Body()


def _along(x: Value, dim: int, point: Point) -> Point:
    """The point without its coordinate in `dim`."""
    return tuple(i for d, i in enumerate(point) if d != dim)


def _reduce(t: Builder, x: Value, dim: int, combine: Combine, body: Any) -> Value:
    dims = [dim] if x.rank else []
    return over(t, x, dims, combine, lambda k, r: body(join(x.rank, dims, k, r)))


@lowers(aten._softmax.default)
def softmax(t: Builder, result: Result, x: Value, dim: int, half_to_float: bool) -> Value:
    """exp(x - max) / sum(exp(x - max))"""
    dim = dim_of(dim, x)
    kind = x.dtype.computed_in
    x = read_twice(t, x)
    top = _reduce(t, x, dim, Combine.MAX, lambda p: cast(x.load(p), kind))

    def shifted(point: Point) -> Expr:
        return _b.exp(_b.sub(cast(x.load(point), kind), top.load(_along(x, dim, point))))

    grown = t.keep(Value(x.size, kind, shifted))
    total = _reduce(t, x, dim, Combine.SUM, grown.load)
    return Value(
        result.size,
        result.dtype,
        # One division a row; the total is at least 1, so its inverse is as exact as any.
        lambda p: _b.mul(grown.load(p), _b.div(1, total.load(_along(x, dim, p)))),
    )


@lowers(aten._log_softmax.default)
def log_softmax(t: Builder, result: Result, x: Value, dim: int, half_to_float: bool) -> Value:
    """x - max - log(sum(exp(x - max)))"""
    dim = dim_of(dim, x)
    kind = x.dtype.computed_in
    x = read_twice(t, x)
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
) -> Value:
    """out * (grad - sum(grad * out))"""
    dim = dim_of(dim, out)
    kind = grad.dtype.computed_in
    grad, out = read_twice(t, grad), read_twice(t, out)

    def product(point: Point) -> Expr:
        return _b.mul(cast(grad.load(point), kind), cast(out.load(point), kind))

    total = _reduce(t, out, dim, Combine.SUM, product)

    def load(point: Point) -> Expr:
        apart = _b.sub(cast(grad.load(point), kind), total.load(_along(out, dim, point)))
        return _b.mul(cast(out.load(point), kind), apart)

    return Value(result.size, result.dtype, load)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    t: Builder, result: Result, grad: Value, out: Value, dim: int, dtype: Any
) -> Value:
    """grad - exp(out) * sum(grad)"""
    dim = dim_of(dim, out)
    kind = grad.dtype.computed_in
    grad = read_twice(t, grad)
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
) -> tuple[Value, Value, Value]:
    """(x - mean) / sqrt(var + eps) * weight + bias, the mean, and 1 / sqrt(var + eps)"""
    weight, bias, eps = parameters
    x = read_twice(t, x)
    rows = x.rank - len(shape)
    inner = x.size[rows:]
    kind = x.dtype.computed_in
    mean, spread = moments(t, x.size[:rows], inner, lambda k, r: cast(x.load((*k, *r)), kind))
    rstd = inverse_deviation(t, spread, count_of(inner, kind), eps)

    def load(point: Point) -> Expr:
        apart = _b.sub(cast(x.load(point), kind), mean.load(point[:rows]))
        value = _b.mul(apart, rstd.load(point[:rows]))
        if weight is not None:
            value = _b.mul(value, cast(weight.load(point[rows:]), kind))
        if bias is not None:
            value = _b.add(value, cast(bias.load(point[rows:]), kind))
        return value

    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, lambda p: mean.load(p[:rows])),
        Value(result[2].size, result[2].dtype, lambda p: rstd.load(p[:rows])),
    )
