"""Scatters: values that go to computed places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Index
from stator.loops.ir import Combine, Const, Expr
from stator.loops.values import Builder, Point, Result, Updates, Value, broadcast, flat, unflat
from stator.ops.arguments import dim_of, probe, replaced, scalar
from stator.ops.index import OUT_OF_RANGE, Range, flat_range, number_of, out_of_bounds, picked
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()

COMBINES: Final = {
    "sum": Combine.SUM,
    "add": Combine.SUM,
    "mean": Combine.SUM,
    "prod": Combine.PROD,
    "multiply": Combine.PROD,
    "amax": Combine.MAX,
    "amin": Combine.MIN,
}
OF_BOOL: Final = {
    Combine.SUM: Combine.ANY,
    Combine.PROD: Combine.ALL,
    Combine.MAX: Combine.ANY,
    Combine.MIN: Combine.ALL,
}


@dataclass(frozen=True, slots=True)
class Places:
    """Points that values come from, and the place in a tensor that each goes to."""

    size: tuple[Index, ...]
    place: Callable[[Point], Point]

    def with_(
        self, value: Callable[[Point], Expr], dtype: DType, combine: Combine | None = None
    ) -> Updates:
        """Values for these places, in the type that elements of `dtype` are computed in."""
        if dtype is DType.BOOL and combine is not None:
            combine = OF_BOOL[combine]
        kind = dtype.computed_in
        return Updates(self.size, self.place, lambda p: cast(value(p), kind), combine)


def _wide(x: Value, combine: Combine | None) -> Value:
    """`x` in the type that sums and products of it are kept in."""
    if combine not in (Combine.SUM, Combine.PROD):
        return x
    return Value(x.size, x.dtype.computed_in, x.load)


def _scattered(
    t: Builder,
    x: Value,
    places: Places,
    value: Callable[[Point], Expr],
    combine: Combine | None = None,
) -> Value:
    """A copy of `x` that took in values; half precision is rounded once, at the end."""
    done = t.scatter(_wide(x, combine), places.with_(value, x.dtype, combine))
    return Value(x.size, x.dtype, done.load)


# --- an index for each element ---


def _along(t: Builder, x: Value, dim: int, index: Value) -> Places:
    """Places of `scatter`: the index replaces the coordinate in `dim`."""
    dim = dim_of(dim, x)
    span = out_of_bounds(x, dim, wraps=False, error=RuntimeError)
    span.check(t, index)

    def place(point: Point) -> Point:
        if not x.rank:
            return ()
        there = span.place(index.load(point))
        return replaced(point, dim, there) if point else (there,)

    return Places(index.size, place)


def _reader(source: Value, index: Value) -> Callable[[Point], Expr]:
    """Reads `source` at points of `index`, which may have a dimension of 1 less or more."""
    if source.rank == index.rank:
        return source.load
    return lambda point: source.load(point[: source.rank] or (Index.of(0),) * source.rank)


@lowers(aten.scatter.src)
def scatter(t: Builder, result: Result, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x, and then result[index[i, j], j] = source[i, j]"""
    return _scattered(t, x, _along(t, x, dim, index), _reader(source, index))


@lowers(aten.scatter.value, exact=Exact.EVERYWHERE)
def scatter_value(
    t: Builder, result: Result, x: Value, dim: int, index: Value, value: Any
) -> Value | None:
    """x, and then result[index[i, j], j] = value"""
    number = scalar(value, x.dtype.computed_in)
    if number is None:
        return None
    places = _along(t, x, dim, index)
    return _chosen(x, dim, index, number) or _scattered(t, x, places, lambda _: number)


def _chosen(x: Value, dim: int, index: Value, number: Expr) -> Value | None:
    """index[i, 0] == j ? number : x[i, j], if x is one number and each row takes one more.

    That joins the kernels that read it, and a scatter does not: times 512 x 1000 logarithms and
    summed, it takes 0.19 milliseconds instead of 0.28; alone as long as before (one core).
    """
    dim, rest = dim_of(dim, x), probe(x)
    once = tuple(Index.of(1) if d == dim else size for d, size in enumerate(x.size))
    is_rounded = x.dtype is not x.dtype.computed_in  # in memory, which this might not see
    if not isinstance(rest, Const) or not x.rank or index.size != once or is_rounded:
        return None

    def load(point: Point) -> Expr:
        there = cast(index.load(replaced(point, dim, Index.of(0))), DType.I64)
        return _b.where(_b.eq(there, number_of(point[dim])), number, rest)

    return Value(x.size, x.dtype, load)


@lowers(aten.scatter_add.default, exact=Exact.INTEGERS)
def scatter_add(
    t: Builder, result: Result, x: Value, dim: int, index: Value, source: Value
) -> Value:
    """x, and then result[index[i, j], j] += source[i, j]"""
    places = _along(t, x, dim, index)
    return _scattered(t, x, places, _reader(source, index), Combine.SUM)


@lowers(aten.scatter.reduce)
def scatter_combined(
    t: Builder, result: Result, x: Value, dim: int, index: Value, *source: Any, reduce: str
) -> Value:
    """x, and then result[index[i, j], j] += or *= source[i, j]"""
    places = _along(t, x, dim, index)
    return _scattered(t, x, places, _reader(source[0], index), COMBINES[reduce])


@lowers(aten.scatter.value_reduce)
def scatter_value_combined(
    t: Builder, result: Result, x: Value, dim: int, index: Value, *value: Any, reduce: str
) -> Value | None:
    """x, and then result[index[i, j], j] += or *= value"""
    number = scalar(value[0], x.dtype.computed_in)
    if number is None:
        return None
    return _scattered(t, x, _along(t, x, dim, index), lambda _: number, COMBINES[reduce])


def _neutral(combine: Combine, dtype: DType) -> Expr:
    """What changes nothing when combined with a value."""
    kind = dtype.computed_in
    if combine in (Combine.SUM, Combine.PROD):
        return const(combine is Combine.PROD, kind)
    low = combine is Combine.MAX
    if kind is DType.BOOL:
        return const(not low, kind)
    if kind.is_float:
        return const(float("-inf") if low else float("inf"), kind)
    bits = 8 * kind.bytes - kind.is_signed
    least, most = (-(1 << bits) if kind.is_signed else 0), (1 << bits) - 1
    return const(least if low else most, kind)


def _reduced(
    t: Builder,
    x: Value,
    places: Places,
    value: Callable[[Point], Expr],
    how: tuple[str, bool],
) -> Value:
    """Values combined at their places, with what `x` holds there or without it."""
    reduce, include_self = how
    combine = COMBINES[reduce]
    before = _wide(x, combine)
    if not include_self:
        neutral = _neutral(combine, x.dtype)
        before = t.scatter(before, places.with_(lambda _: neutral, x.dtype))
    done = t.scatter(before, places.with_(value, x.dtype, combine))
    if reduce != "mean":
        return Value(x.size, x.dtype, done.load)
    kind = x.dtype.computed_in
    one, start = const(1, kind), const(include_self, kind)
    ones = Value(x.size, kind, lambda _: start)
    count = t.scatter(ones, places.with_(lambda _: one, kind, Combine.SUM))
    return Value(x.size, x.dtype, lambda p: _divided(done.load(p), _b.max(count.load(p), 1)))


def _divided(total: Expr, count: Expr) -> Expr:
    """total / count, of integers rounded down."""
    if total.dtype.is_float:
        return _b.div(total, count)
    quotient = _b.div(total, count)
    below = _b.lt(_b.sub(total, _b.mul(quotient, count)), 0)
    return _b.where(below, _b.sub(quotient, 1), quotient)


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    t: Builder,
    result: Result,
    x: Value,
    dim: int,
    index: Value,
    *given: Any,
    include_self: bool = True,
) -> Value | None:
    """x, and then result[index[i, j], j] combined with source[i, j]"""
    source, reduce = given
    if x.dtype is DType.BOOL and reduce == "mean":
        return None
    places = _along(t, x, dim, index)
    return _reduced(t, x, places, _reader(source, index), (reduce, include_self))


# --- an index for each position of a dimension ---


def _across(x: Value, dim: int, index: Value, source_size: Sequence[Index], span: Range) -> Places:
    """Places of `index_add`: the coordinate in `dim` selects an element of the index."""
    dim = dim_of(dim, x)

    def place(point: Point) -> Point:
        if not x.rank:
            return ()
        there = span.place(index.load((point[dim],) if index.rank else ()))
        return replaced(point, dim, there)

    return Places(tuple(source_size), place)


def _selected_size(x: Value, dim: int, index: Value) -> tuple[Index, ...]:
    length = index.size[0] if index.rank else Index.of(1)
    if not x.rank:
        return (length,)
    dim = dim_of(dim, x)
    return (*x.size[:dim], length, *x.size[dim + 1 :])


def _rows_of(source: Value, size: Sequence[Index]) -> Callable[[Point], Expr]:
    """Reads `source` at points of `size`; a number alone stands for one element."""
    return source.load if source.rank == len(size) else lambda point: source.load(())


@lowers(aten.index_add.default, exact=Exact.INTEGERS)
def index_add(
    t: Builder, result: Result, x: Value, dim: int, index: Value, source: Value, **options: Any
) -> Value | None:
    """x, and then result[index[k]] += alpha * source[k]"""
    kind = x.dtype.computed_in
    alpha = scalar(options.get("alpha", 1), kind)
    if alpha is None:
        return None
    factor = alpha
    span = out_of_bounds(x, dim_of(dim, x), wraps=False, error=RuntimeError)
    if x.rank <= 1:
        span = Range(span.length, False, IndexError, OUT_OF_RANGE)
    span.check(t, index)
    size = _selected_size(x, dim, index)
    read = _rows_of(source, size)

    def value(point: Point) -> Expr:
        term = cast(read(point), kind)
        if options.get("alpha", 1) == 1:
            return term
        return _b.and_(term, factor) if kind is DType.BOOL else _b.mul(term, factor)

    return _scattered(t, x, _across(x, dim, index, size, span), value, Combine.SUM)


@lowers(aten.index_copy.default)
def index_copy(
    t: Builder, result: Result, x: Value, dim: int, index: Value, source: Value
) -> Value:
    """x, and then result[index[k]] = source[k]"""
    span = out_of_bounds(x, dim_of(dim, x), wraps=False, error=IndexError)
    span.check(t, index)
    size = _selected_size(x, dim, index)
    return _scattered(t, x, _across(x, dim, index, size, span), _rows_of(source, size))


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, exact=Exact.EVERYWHERE)
def index_fill(
    t: Builder, result: Result, x: Value, dim: int, index: Value, value: Any
) -> Value | None:
    """x, and then result[index[k]] = value"""
    number = value.load(()) if isinstance(value, Value) else scalar(value, x.dtype.computed_in)
    if number is None:
        return None
    span = out_of_bounds(x, dim_of(dim, x), wraps=True, error=IndexError)
    span.check(t, index)
    size = _selected_size(x, dim, index)
    return _scattered(t, x, _across(x, dim, index, size, span), lambda _: number)


@lowers(aten.index_reduce.default)
def index_reduce(
    t: Builder,
    result: Result,
    x: Value,
    dim: int,
    index: Value,
    *given: Any,
    include_self: bool = True,
) -> Value | None:
    """x, and then result[index[k]] combined with source[k]"""
    source, reduce = given
    if x.dtype is DType.BOOL and reduce == "mean":
        return None
    length = x.size[dim_of(dim, x)] if x.rank else Index.of(1)
    span = Range(length, False, IndexError, OUT_OF_RANGE)
    span.check(t, index)
    size = _selected_size(x, dim, index)
    places = _across(x, dim, index, size, span)
    return _reduced(t, x, places, _rows_of(source, size), (reduce, include_self))


# --- indices for several dimensions ---


def _put(
    t: Builder, x: Value, indices: Sequence[Value | None], values: Value, how: tuple[bool, bool]
) -> Value | None:
    accumulate, safe = how
    chosen = picked(x, indices)
    if chosen is None:
        return _put_where(x, indices, values, accumulate=accumulate)
    if not safe:
        chosen.check(t)
    size = chosen.size
    spread = broadcast(values, size)
    combine = Combine.SUM if accumulate else None
    return _scattered(t, x, Places(size, chosen.source), spread.load, combine)


def _put_where(
    x: Value, indices: Sequence[Value | None], values: Value, *, accumulate: bool
) -> Value | None:
    """One number where a mask says so."""
    given = [(dim, mask) for dim, mask in enumerate(indices) if mask is not None]
    is_one = all(length.constant == 1 for length in values.size)
    if len(given) != 1 or given[0][1].dtype is not DType.BOOL or not is_one:
        return None
    dim, mask = given[0]
    kind = x.dtype.computed_in
    if accumulate and kind is DType.BOOL:
        return None

    def load(point: Point) -> Expr:
        before = x.load(point)
        value = cast(values.load((Index.of(0),) * values.rank), kind)
        value = _b.add(before, value) if accumulate else value
        return _b.where(mask.load(point[dim : dim + mask.rank]), value, before)

    return Value(x.size, x.dtype, load)


@lowers(aten.index_put.default)
def index_put(
    t: Builder, result: Result, x: Value, indices: Any, values: Value, accumulate: bool = False
) -> Value | None:
    """x, and then result[i[k], j[k]] = values[k], or += values[k]"""
    return _put(t, x, indices, values, (accumulate, False))


@lowers(aten._unsafe_index_put.default)
def unsafe_index_put(
    t: Builder, result: Result, x: Value, indices: Any, values: Value, accumulate: bool = False
) -> Value | None:
    """The same of indices that are in range: they were computed to be."""
    return _put(t, x, indices, values, (accumulate, True))


@lowers(aten.put.default)
def put(
    t: Builder, result: Result, x: Value, index: Value, source: Value, accumulate: bool = False
) -> Value:
    """x, and then result.flatten()[index[k]] = source[k], or += source[k]"""
    span = flat_range(x)
    span.check(t, index)
    places = Places(index.size, lambda p: unflat(span.place(index.load(p)), x.size))
    same = source.size == index.size

    def value(point: Point) -> Expr:
        return source.load(point if same else unflat(flat(point, index.size), source.size))

    return _scattered(t, x, places, value, Combine.SUM if accumulate else None)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    t: Builder, result: Result, grad: Value, index: Value, *options: Any
) -> Value | None:
    """result[index[k]] += grad[k], but nothing to the padding"""
    _, padding, by_frequency = options
    if by_frequency:
        return None
    kind = result.dtype.computed_in
    zero = const(0, kind)
    rows, rank = result.size[0], index.rank
    span = Range(rows, False, IndexError, OUT_OF_RANGE)

    def place(point: Point) -> Point:
        return (span.place(index.load(point[:rank])), *point[rank:])

    def value(point: Point) -> Expr:
        term = cast(grad.load(point), kind)
        if padding < 0:
            return term
        return _b.where(_b.eq(index.load(point[:rank]), padding), zero, term)

    into = Value(result.size, result.dtype, lambda _: zero)
    return _scattered(t, into, Places((*index.size, *result.size[1:]), place), value, Combine.SUM)
