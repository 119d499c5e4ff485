"""Norms of vectors: of a tensor's dimensions, of a difference, of a layer's weights."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value, broadcast
from stator.ops.reduce import common_size, join, mapped, over, reduced_dims, shaped, summed
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()

RENORM_EPSILON: Final = 1e-7  # eager's


def _norm(t: Builder, x: Value, dims: list[int], order: float, kind: DType) -> Value:
    """The norm over `dims`, in `kind`."""
    single = all(x.size[d].constant == 1 for d in dims)  # then a square could only overflow

    def part(value: Expr) -> Expr:
        if order == 0:
            return _b.where(_b.eq(value, 0), _b.const(0, value), _b.const(1, value))
        size = _b.abs(value)
        if order == 1 or math.isinf(order) or single:
            return size
        return _b.square(size) if order == 2 else _b.pow(size, order)

    def body(kept: Point, reduced: Point) -> Expr:
        return part(cast(x.load(join(x.rank, dims, kept, reduced)), kind))

    if math.isinf(order):
        return over(t, x, dims, Combine.MAX if order > 0 else Combine.MIN, body)
    kept = [x.size[d] for d in range(x.rank) if d not in dims]
    total = summed(t, kept, [x.size[d] for d in dims], kind, body)
    if order in (0, 1) or single:
        return total
    if order == 2:
        return mapped(total, _b.sqrt, kind)
    return mapped(total, lambda value: _b.pow(value, 1 / order), kind)


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    t: Builder, result: Result, x: Value, order: float = 2, dim: Any = None, *_: Any, **__: Any
) -> Value:
    """sum(|x|**order)**(1 / order); the count of what is not 0, the largest or smallest |x|"""
    dims = reduced_dims(x, dim)
    return shaped(_norm(t, x, dims, order, result.dtype.computed_in), result, dims)


@lowers(aten.norm.Scalar, aten.norm.ScalarOpt_dtype)
def norm_all(t: Builder, result: Result, x: Value, p: float | None = 2, dtype: Any = None) -> Value:
    """The norm of all elements."""
    return vector_norm(t, result, x, 2 if p is None else p)


@lowers(aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def norm_dim(
    t: Builder, result: Result, x: Value, p: float | None, dim: Any, *_: Any, **__: Any
) -> Value:
    """The norm over dimensions."""
    return vector_norm(t, result, x, 2 if p is None else p, dim)


@lowers(aten.dist.default)
def dist(t: Builder, result: Result, x: Value, y: Value, p: float = 2) -> Value:
    """The norm of x - y."""
    size, kind = common_size(x, y), result.dtype.computed_in
    left, right = broadcast(x, size), broadcast(y, size)

    def apart(point: Point) -> Expr:
        return _b.sub(cast(left.load(point), kind), cast(right.load(point), kind))

    return vector_norm(t, result, Value(size, kind, apart), p)


@lowers(aten.renorm.default)
def renorm(t: Builder, result: Result, x: Value, p: float, dim: int, maxnorm: float) -> Value:
    """x * maxnorm / (norm + 1e-7) where the norm of what shares an index of `dim` is above it"""
    dim %= x.rank
    kind = result.dtype.computed_in
    norm = _norm(t, x, [d for d in range(x.rank) if d != dim], p, kind)

    def factor(point: Point) -> Expr:
        length = norm.load(point)
        shorter = _b.div(float(maxnorm), _b.add(length, RENORM_EPSILON))
        return _b.where(_b.gt(length, float(maxnorm)), shorter, 1)

    factors = t.keep(Value(norm.size, kind, factor))
    return Value(
        result.size,
        result.dtype,
        lambda p: _b.mul(cast(x.load(p), kind), factors.load((p[dim],))),
    )


@lowers(aten._weight_norm_interface.default)
def weight_norm(
    t: Builder, result: tuple[Result, Result], v: Value, g: Value, dim: int = 0
) -> tuple[Value, Value]:
    """v * g / norm(v), and the norm, of what shares an index of `dim`"""
    dim %= v.rank
    kind = result[1].dtype.computed_in
    norm = t.keep(_norm(t, v, [d for d in range(v.rank) if d != dim], 2, kind))

    def load(point: Point) -> Expr:
        scale = _b.div(cast(g.load(_only(dim, point)), kind), norm.load((point[dim],)))
        return cast(_b.mul(cast(v.load(point), kind), scale), result[0].dtype.computed_in)

    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, lambda p: norm.load((p[dim],))),
    )


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    t: Builder, result: tuple[Result, Result], grad: Value, v: Value, g: Value, *rest: Any
) -> tuple[Value, Value]:
    """g / norm * (grad - v * s / norm**2) and s / norm, with s = sum(grad * v)"""
    norm, dim = rest
    dim %= v.rank
    kind = norm.dtype.computed_in
    others = [d for d in range(v.rank) if d != dim]

    def product(kept: Point, reduced: Point) -> Expr:
        point = join(v.rank, others, kept, reduced)
        return _b.mul(cast(grad.load(point), kind), cast(v.load(point), kind))

    total = over(t, v, others, Combine.SUM, product)

    def along(point: Point) -> Expr:
        return _b.div(total.load((point[dim],)), cast(norm.load(_only(dim, point)), kind))

    def of_v(point: Point) -> Expr:
        length = cast(norm.load(_only(dim, point)), kind)
        shift = _b.mul(cast(v.load(point), kind), _b.div(along(point), length))
        scale = _b.div(cast(g.load(_only(dim, point)), kind), length)
        value = _b.mul(scale, _b.sub(cast(grad.load(point), kind), shift))
        return cast(value, result[0].dtype.computed_in)

    return (
        Value(result[0].size, result[0].dtype, of_v),
        Value(result[1].size, result[1].dtype, lambda p: cast(along(p), g.dtype.computed_in)),
    )


def _only(dim: int, point: Point) -> Point:
    """The point of a tensor that has a size in `dim` alone."""
    return tuple(index if d == dim else index * 0 for d, index in enumerate(point))
