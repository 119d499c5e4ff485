"""Reductions: sum, mean, extremes, variance, any and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


def reduced_dims(x: Value, dims: Any) -> list[int]:
    """The dimensions that `dims` means, in order; all where it means none."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(x.rank))
    given = [dims] if isinstance(dims, int) else list(dims)
    return sorted({dim % x.rank for dim in given}) if x.rank else []


def over(
    t: Builder,
    x: Value,
    dims: Sequence[int],
    combine: Combine,
    body: Callable[[Point, Point], Expr],
) -> Value:
    """Reduce over `dims`; the body sees points of the kept and of the reduced dimensions."""
    kept = [x.size[d] for d in range(x.rank) if d not in dims]
    return t.reduce(combine, kept, [x.size[d] for d in dims], body)


def join(rank: int, dims: Sequence[int], kept: Point, reduced: Point) -> Point:
    """A point of the whole from the points of its two parts."""
    outer, inner = iter(kept), iter(reduced)
    return tuple(next(inner if d in dims else outer) for d in range(rank))


def shaped(value: Value, result: Result, dims: Sequence[int]) -> Value:
    """A reduced value in the result's size: reduced dimensions of 1 stay or are gone."""
    if value.rank == len(result.size):
        return Value(result.size, value.dtype, value.load)

    def load(point: Point) -> Expr:
        return value.load(tuple(i for d, i in enumerate(point) if d not in dims))

    return Value(result.size, value.dtype, load)


def mapped(value: Value, function: Callable[[Expr], Expr], dtype: DType) -> Value:
    """A function of each element."""
    return Value(value.size, dtype, lambda point: function(value.load(point)))


def _simple(t: Builder, result: Result, x: Value, dims: Any, combine: Combine) -> Value:
    axes = reduced_dims(x, dims)
    kind = result.dtype.computed_in

    def body(kept: Point, reduced: Point) -> Expr:
        return cast(x.load(join(x.rank, axes, kept, reduced)), kind)

    return shaped(over(t, x, axes, combine, body), result, axes)


@lowers(aten.sum.dim_IntList)
def sum_dims(
    t: Builder, result: Result, x: Value, dim: Any, keepdim: bool = False, dtype: Any = None
) -> Value:
    """Sum over dimensions."""
    return _simple(t, result, x, dim, Combine.SUM)


@lowers(aten.sum.default)
def sum_all(t: Builder, result: Result, x: Value, dtype: Any = None) -> Value:
    """Sum of all elements."""
    return _simple(t, result, x, None, Combine.SUM)


@lowers(aten.amax.default)
def amax(t: Builder, result: Result, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Largest element; NaN if there is one."""
    return _simple(t, result, x, dim, Combine.MAX)


@lowers(aten.amin.default)
def amin(t: Builder, result: Result, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Smallest element; NaN if there is one."""
    return _simple(t, result, x, dim, Combine.MIN)


def _count(x: Value, axes: Sequence[int]) -> int | None:
    total = Index.of(1)
    for axis in axes:
        total = total * x.size[axis]
    return total.constant


@lowers(aten.mean.dim, aten.mean.default)
def mean(
    t: Builder,
    result: Result,
    x: Value,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Value | None:
    """sum / count"""
    count = _count(x, reduced_dims(x, dim))
    if count is None or not result.dtype.is_float:
        return None
    total = _simple(t, result, x, dim, Combine.SUM)
    return mapped(total, lambda s: _b.div(s, float(count)), result.dtype)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(
    t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False
) -> Value | None:
    """Whether some element is not zero."""
    return _simple(t, result, x, dim, Combine.ANY) if result.dtype is DType.BOOL else None


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(
    t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False
) -> Value | None:
    """Whether no element is zero."""
    return _simple(t, result, x, dim, Combine.ALL) if result.dtype is DType.BOOL else None
