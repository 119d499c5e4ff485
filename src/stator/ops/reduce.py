"""Reductions: sums, products, means, extremes, any and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value, product
from stator.ops.arguments import settled
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()

FEW_RESULTS: Final = 16

# Among bools, a sum or the largest is whether any is true.
_OF_BOOLS: Final = {
    Combine.SUM: Combine.ANY,
    Combine.MAX: Combine.ANY,
    Combine.PROD: Combine.ALL,
    Combine.MIN: Combine.ALL,
}


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
    """A reduced value as the result: reduced dimensions of 1 stay or are gone."""
    if value.rank == len(result.size):
        return Value(result.size, result.dtype, value.load)

    def load(point: Point) -> Expr:
        return value.load(tuple(i for d, i in enumerate(point) if d not in dims))

    return Value(result.size, result.dtype, load)


def mapped(value: Value, function: Callable[[Expr], Expr], dtype: DType) -> Value:
    """A function of each element."""
    return Value(value.size, dtype, lambda point: function(value.load(point)))


def count_of(sizes: Sequence[Index], dtype: DType) -> Expr:
    """How many points `sizes` have, as a number."""
    count = product(sizes)
    known = count.constant
    return IndexValue(dtype, count) if known is None else const(known, dtype)


def common_size(*values: Value) -> tuple[Index, ...]:
    """The size that torch broadcasts all of them to."""
    rank = max(value.rank for value in values)
    padded = [(*[Index.of(1)] * (rank - value.rank), *value.size) for value in values]
    return tuple(
        next((n for n in sizes if n.constant != 1), Index.of(1))
        for sizes in zip(*padded, strict=True)
    )


def read_twice(t: Builder, x: Value) -> Value:
    """`x` for an operator that goes over it more than once: in memory where it is dear."""
    return settled(t, x, (Index.of(2), *x.size))


def summed(
    t: Builder,
    size: Sequence[Index],
    inner: Sequence[Index],
    kind: DType,
    body: Callable[[Point, Point], Expr],
) -> Value:
    """A sum, in `kind`; where it gives few numbers, f32 is added up in f64.

    The error of one number among many drowns in theirs.  That of a single one, whose terms may
    cancel, is all there is; and then reading memory takes longer than adding in f64.
    """
    results = product(size).constant
    if kind is not DType.F32 or results is None or results > FEW_RESULTS:
        return t.reduce(Combine.SUM, size, inner, body)
    total = t.reduce(Combine.SUM, size, inner, lambda k, r: cast(body(k, r), DType.F64))
    return mapped(total, lambda value: cast(value, kind), kind)


def combined(t: Builder, x: Value, dims: Sequence[int], combine: Combine, kind: DType) -> Value:
    """Elements converted to `kind` and combined over `dims`."""
    if kind is DType.BOOL:
        combine = _OF_BOOLS.get(combine, combine)

    def body(kept: Point, reduced: Point) -> Expr:
        return cast(x.load(join(x.rank, dims, kept, reduced)), kind)

    if combine is not Combine.SUM:
        return over(t, x, dims, combine, body)
    kept = [x.size[d] for d in range(x.rank) if d not in dims]
    return summed(t, kept, [x.size[d] for d in dims], kind, body)


def _simple(t: Builder, result: Result, x: Value, dims: Any, combine: Combine) -> Value:
    axes = reduced_dims(x, dims)
    return shaped(combined(t, x, axes, combine, result.dtype.computed_in), result, axes)


@lowers(aten.sum.dim_IntList, exact=Exact.INTEGERS)
def sum_dims(
    t: Builder, result: Result, x: Value, dim: Any, keepdim: bool = False, dtype: Any = None
) -> Value:
    """Sum over dimensions."""
    return _simple(t, result, x, dim, Combine.SUM)


@lowers(aten.sum.default, exact=Exact.INTEGERS)
def sum_all(t: Builder, result: Result, x: Value, dtype: Any = None) -> Value:
    """Sum of all elements."""
    return _simple(t, result, x, None, Combine.SUM)


@lowers(aten.nansum.default)
def nansum(
    t: Builder,
    result: Result,
    x: Value,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Value:
    """Sum of the elements that are not NaN."""

    def number(value: Expr) -> Expr:
        return _b.where(_b.is_nan(value), 0, value) if value.dtype.is_float else value

    return _simple(t, result, mapped(x, number, x.dtype), dim, Combine.SUM)


@lowers(aten.prod.default, exact=Exact.INTEGERS)
def prod_all(t: Builder, result: Result, x: Value, dtype: Any = None) -> Value:
    """Product of all elements."""
    return _simple(t, result, x, None, Combine.PROD)


@lowers(aten.prod.dim_int, exact=Exact.INTEGERS)
def prod_dim(
    t: Builder, result: Result, x: Value, dim: int, keepdim: bool = False, dtype: Any = None
) -> Value:
    """Product over a dimension."""
    return _simple(t, result, x, dim, Combine.PROD)


@lowers(aten.trace.default, exact=Exact.INTEGERS)
def trace(t: Builder, result: Result, x: Value) -> Value | None:
    """Sum of x[i, i]"""
    rows, columns = x.size
    lengths = [n for n in (rows.constant, columns.constant) if n is not None]
    if rows is not columns and len(lengths) < 2:
        return None  # which one is shorter is not known
    length = rows if rows is columns else Index.of(min(lengths))
    kind = result.dtype.computed_in
    total = t.reduce(Combine.SUM, [], [length], lambda _, r: cast(x.load((*r, *r)), kind))
    return shaped(total, result, [])


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, exact=Exact.EVERYWHERE)
def count_nonzero(t: Builder, result: Result, x: Value, dim: Any = None) -> Value:
    """Sum of 1 for each element that is not 0."""
    kind = x.dtype.computed_in
    found = mapped(x, lambda value: _b.ne(cast(value, kind), 0), DType.BOOL)
    return _simple(t, result, found, dim, Combine.SUM)


@lowers(aten.amax.default, aten.max.default, exact=Exact.INTEGERS)
def amax(t: Builder, result: Result, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Largest element; NaN if there is one."""
    return _simple(t, result, x, dim, Combine.MAX)


@lowers(aten.amin.default, aten.min.default, exact=Exact.INTEGERS)
def amin(t: Builder, result: Result, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Smallest element; NaN if there is one."""
    return _simple(t, result, x, dim, Combine.MIN)


@lowers(aten.aminmax.default, exact=Exact.INTEGERS)
def aminmax(
    t: Builder, result: tuple[Result, Result], x: Value, *, dim: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    """Smallest and largest element; NaN if there is one."""
    return (
        _simple(t, result[0], x, dim, Combine.MIN),
        _simple(t, result[1], x, dim, Combine.MAX),
    )


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
    if not result.dtype.is_float:
        return None
    count = count_of([x.size[d] for d in reduced_dims(x, dim)], result.dtype.computed_in)
    total = _simple(t, result, x, dim, Combine.SUM)
    return mapped(total, lambda s: _b.div(s, count), result.dtype)


@lowers(aten.logsumexp.default)
def logsumexp(t: Builder, result: Result, x: Value, dim: Any, keepdim: bool = False) -> Value:
    """log(sum(exp(x - max))) + max, where an infinite max counts as 0"""
    x = read_twice(t, x)
    axes = reduced_dims(x, dim)
    kind = result.dtype.computed_in
    top = combined(t, x, axes, Combine.MAX, kind)

    def shift(kept: Point) -> Expr:
        largest = top.load(kept)
        return _b.where(_b.eq(_b.abs(largest), float("inf")), 0, largest)

    def grown(kept: Point, reduced: Point) -> Expr:
        value = cast(x.load(join(x.rank, axes, kept, reduced)), kind)
        return _b.exp(_b.sub(value, shift(kept)))

    total = over(t, x, axes, Combine.SUM, grown)
    value = Value(total.size, kind, lambda k: _b.add(_b.log(total.load(k)), shift(k)))
    return shaped(value, result, axes)


def _whether(t: Builder, result: Result, x: Value, dims: Any, combine: Combine) -> Value:
    axes = [] if isinstance(dims, list | tuple) and not dims else reduced_dims(x, dims)
    kind = result.dtype.computed_in
    found = combined(t, x, axes, combine, DType.BOOL)
    return shaped(mapped(found, lambda value: cast(value, kind), kind), result, axes)


@lowers(aten.any.default, aten.any.dim, aten.any.dims, exact=Exact.EVERYWHERE)
def any_(t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """Whether some element is not zero; here an empty list of dimensions means none."""
    return _whether(t, result, x, dim, Combine.ANY)


@lowers(aten.all.default, aten.all.dim, aten.all.dims, exact=Exact.EVERYWHERE)
def all_(t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """Whether no element is zero; here an empty list of dimensions means none."""
    return _whether(t, result, x, dim, Combine.ALL)
