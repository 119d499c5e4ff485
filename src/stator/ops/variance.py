"""Variance and standard deviation, and the moments that norms are made of.

In f64, of narrower types, both moments take one pass over the elements.  Where there are no bits to
spare, the mean comes first, and then the squared distances from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr, within
from stator.loops.values import Builder, Point, Result, Value, product
from stator.ops.reduce import count_of, join, read_twice, reduced_dims, shaped
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


def moments(
    t: Builder,
    size: Sequence[Index],
    inner: Sequence[Index],
    read: Callable[[Point, Point], Expr],
) -> tuple[Value, Value]:
    """The mean, and the sum of squared distances from it, in the type that `read` gives."""
    total = t.reduce(Combine.SUM, size, inner, read)
    count = count_of(inner, total.dtype)
    mean = t.keep(Value(total.size, total.dtype, lambda k: _b.div(total.load(k), count)))

    def square(kept: Point, reduced: Point) -> Expr:
        return _b.square(_b.sub(read(kept, reduced), mean.load(kept)))

    return mean, t.reduce(Combine.SUM, size, inner, square)


def moments_in_f64(
    t: Builder,
    size: Sequence[Index],
    inner: Sequence[Index],
    kind: DType,
    read: Callable[[Point, Point], Expr],
) -> tuple[Value, Value]:
    """The same in f64, whatever `kind` it is that `read` gives."""
    if kind is DType.F64:
        return moments(t, size, inner, read)
    return _moments_at_once(t, size, inner, read)


def _moments_at_once(
    t: Builder,
    size: Sequence[Index],
    inner: Sequence[Index],
    read: Callable[[Point, Point], Expr],
) -> tuple[Value, Value]:
    """The same in one pass and in f64, of what `read` gives in a narrower type.

    With d = x - x0, where x0 is the first element: x0 + sum(d) / n, sum(d**2) - sum(d)**2 / n

    Where x0 is K deviations from the mean, the difference loses 2 log2(K) of f64's 53 bits.  There
    is no K above sqrt(n), since x0 itself is among the elements: of a million, 20 bits at most.
    """
    count = product(inner)
    number = count_of(inner, DType.F64)

    def first(kept: Point) -> Expr:
        value = read(kept, tuple(Index.of(0) for _ in inner))
        # Subtracted, an infinity would make NaN of itself, and so of the mean.
        finite = _b.where(_b.eq(_b.sub(value, value), 0), value, 0)
        return cast(within(Index.of(0), count, finite, const(0, value.dtype)), DType.F64)

    def apart(kept: Point, reduced: Point) -> Expr:
        return _b.sub(cast(read(kept, reduced), DType.F64), first(kept))

    plain = t.reduce(Combine.SUM, size, inner, apart)
    squares = t.reduce(Combine.SUM, size, inner, lambda k, r: _b.square(apart(k, r)))

    def average(kept: Point) -> Expr:
        return _b.add(first(kept), _b.div(plain.load(kept), number))

    def left(kept: Point) -> Expr:
        value = _b.sub(squares.load(kept), _b.div(_b.square(plain.load(kept)), number))
        return _b.where(_b.lt(value, 0), 0, value)  # rounding; NaN stays

    return (
        t.keep(Value(plain.size, DType.F64, average)),
        t.keep(Value(plain.size, DType.F64, left)),
    )


def inverse_deviation(t: Builder, spread: Value, count: Expr, eps: float) -> Value:
    """1 / sqrt(spread / count + eps)"""

    def load(point: Point) -> Expr:
        return _b.rsqrt(_b.add(_b.div(spread.load(point), count), eps))

    return t.keep(Value(spread.size, spread.dtype, load))


def _variance(
    t: Builder, x: Value, dims: list[int], correction: float | None
) -> tuple[Value, Value] | None:
    """Variance and mean, in f64 as eager's: one rounding in the end."""
    less = 1 if correction is None else correction
    inner = [x.size[d] for d in dims]
    known = product(inner).constant
    if known is not None and known <= less:
        return None  # eager warns
    x, kind = read_twice(t, x), x.dtype.computed_in
    kept = [x.size[d] for d in range(x.rank) if d not in dims]

    def read(outer: Point, reduced: Point) -> Expr:
        return cast(x.load(join(x.rank, dims, outer, reduced)), kind)

    mean, spread = moments_in_f64(t, kept, inner, kind, read)

    def finite(point: Point) -> Expr:
        # Eager's mean is NaN beside a variance that is, so of infinities too.
        return _b.where(_b.is_nan(spread.load(point)), float("nan"), mean.load(point))

    degrees = _b.sub(count_of(inner, DType.F64), float(less))
    return (
        Value(spread.size, DType.F64, lambda k: _b.div(spread.load(k), degrees)),
        Value(mean.size, DType.F64, finite),
    )


def _as_result(value: Value, result: Result, dims: list[int], *, root: bool = False) -> Value:
    kind = result.dtype.computed_in

    def load(point: Point) -> Expr:
        loaded = value.load(point)
        return cast(_b.sqrt(loaded) if root else loaded, kind)

    return shaped(Value(value.size, kind, load), result, dims)


@lowers(aten.var.correction)
def var(
    t: Builder,
    result: Result,
    x: Value,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value | None:
    """sum((x - mean)**2) / (count - correction)"""
    dims = reduced_dims(x, dim)
    found = _variance(t, x, dims, correction)
    return None if found is None else _as_result(found[0], result, dims)


@lowers(aten.std.correction)
def std(
    t: Builder,
    result: Result,
    x: Value,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value | None:
    """sqrt(var)"""
    dims = reduced_dims(x, dim)
    found = _variance(t, x, dims, correction)
    return None if found is None else _as_result(found[0], result, dims, root=True)


@lowers(aten.var_mean.correction)
def var_mean(
    t: Builder,
    result: tuple[Result, Result],
    x: Value,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value] | None:
    """The variance and the mean."""
    dims = reduced_dims(x, dim)
    found = _variance(t, x, dims, correction)
    if found is None:
        return None
    return _as_result(found[0], result[0], dims), _as_result(found[1], result[1], dims)


@lowers(aten.std_mean.correction)
def std_mean(
    t: Builder,
    result: tuple[Result, Result],
    x: Value,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value] | None:
    """The standard deviation and the mean."""
    dims = reduced_dims(x, dim)
    found = _variance(t, x, dims, correction)
    if found is None:
        return None
    return (
        _as_result(found[0], result[0], dims, root=True),
        _as_result(found[1], result[1], dims),
    )
