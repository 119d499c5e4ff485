"""Scans: running sums, products and extremes along a dimension."""

from __future__ import annotations

from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.half import as_held
from stator.loops.ir import Combine, Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import read_twice
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()


def _running(t: Builder, result: Result, x: Value, dim: int, combine: Combine) -> Value | None:
    """Floats are combined in f64, as eager's: errors would add up along the way."""
    own = result.dtype.computed_in
    kind = DType.F64 if own.is_float else own
    if kind is DType.BOOL:
        return None

    def load(point: Point) -> Expr:
        # Through the result's type: eager converts first, then accumulates.
        return cast(cast(x.load(point), own), kind)

    if x.rank == 0:
        return Value(result.size, result.dtype, lambda p: cast(load(p), own))
    total = t.scan(combine, Value(x.size, kind, load), dim % x.rank)
    return Value(result.size, result.dtype, lambda p: cast(total.load(p), own))


@lowers(aten.cumsum.default, exact=Exact.INTEGERS)
def cumsum(t: Builder, result: Result, x: Value, dim: int, *, dtype: Any = None) -> Value | None:
    """The sum of x up to each position."""
    return _running(t, result, x, dim, Combine.SUM)


@lowers(aten.cumprod.default, exact=Exact.INTEGERS)
def cumprod(t: Builder, result: Result, x: Value, dim: int, *, dtype: Any = None) -> Value | None:
    """The product of x up to each position."""
    return _running(t, result, x, dim, Combine.PROD)


def _running_extreme(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int, combine: Combine
) -> tuple[Value, Value] | None:
    if x.rank == 0 or x.dtype is DType.BOOL:
        return None
    x, dim, kind = as_held(read_twice(t, x)), dim % x.rank, x.dtype.computed_in
    found = t.scan(combine, Value(x.size, kind, lambda p: cast(x.load(p), kind)), dim)

    def place(point: Point) -> Expr:
        value = cast(x.load(point), kind)
        same = _b.eq(value, found.load(point))
        if kind.is_float:
            same = _b.or_(same, _b.is_nan(value))
        return _b.where(same, IndexValue(DType.I64, point[dim]), const(0, DType.I64))

    where = t.scan(Combine.MAX, Value(x.size, DType.I64, place), dim)
    return (
        Value(result[0].size, result[0].dtype, found.load),
        Value(result[1].size, result[1].dtype, where.load),
    )


@lowers(aten.cummax.default, exact=Exact.INTEGERS)
def cummax(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int
) -> tuple[Value, Value] | None:
    """The largest up to each position, NaN once there is one, and where it was met last."""
    return _running_extreme(t, result, x, dim, Combine.MAX)


@lowers(aten.cummin.default, exact=Exact.INTEGERS)
def cummin(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int
) -> tuple[Value, Value] | None:
    """The smallest up to each position, NaN once there is one, and where it was met last."""
    return _running_extreme(t, result, x, dim, Combine.MIN)
