"""Gathers: elements at computed places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Element, Index, is_at_least, lower_bound, upper_bound
from stator.loops.ir import Cast, Const, Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value, broadcast, product, unflat
from stator.ops.arguments import dim_of, is_row_major, probe, replaced, settled
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()

OUT_OF_RANGE = "index out of range in self"


# --- computed places ---


def number_of(index: Index) -> Expr:
    """A place as an integer to compute with."""
    whole = index.constant
    return IndexValue(DType.I64, index) if whole is None else const(whole, DType.I64)


def _known(expr: Expr) -> Index | None:
    """The index that an integer expression is, if it is one; narrow types may have wrapped."""
    while isinstance(expr, Cast) and expr.dtype is DType.I64 and expr.value.dtype is DType.I32:
        expr = expr.value
    if isinstance(expr, Const) and not expr.dtype.is_float:
        return Index.of(int(expr.value))
    is_whole = isinstance(expr, IndexValue) and expr.dtype in (DType.I64, DType.I32)
    return expr.index if isinstance(expr, IndexValue) and is_whole else None


def _lies_in(index: Index | None, low: Index, limit: Index) -> bool:
    """Whether it is known that low <= index < limit."""
    if index is None:
        return False
    least, most = lower_bound(index), upper_bound(index)
    if least is None or most is None:
        return False
    return is_at_least(least - low, 0) and is_at_least(limit - most, 1)


def place_at(expr: Expr, length: Index, *, wraps: bool) -> Index:
    """A computed number as a place of a dimension: never outside of it."""
    index = _known(expr)
    if index is not None and _lies_in(index, Index.of(0), length):
        return index
    if index is not None and wraps and _lies_in(index, -length, Index.of(0)):
        return index + length
    number = cast(expr, DType.I64)
    if wraps:
        number = _b.where(_b.lt(number, 0), _b.add(number, number_of(length)), number)
    return Index.of(Element(_b.max(_b.min(number, number_of(length - 1)), 0)))


@dataclass(frozen=True, slots=True)
class Range:
    """What an index may be, and what eager raises if it is not."""

    length: Index
    wraps: bool
    error: type[Exception]
    message: str

    def check(self, t: Builder, index: Value) -> None:
        """Raise at run time where an element lies outside."""
        low = -self.length if self.wraps else Index.of(0)
        if _lies_in(_known(probe(index)), low, self.length):
            return

        def holds(point: Point) -> Expr:
            number = cast(index.load(point), DType.I64)
            return _b.and_(_b.ge(number, number_of(low)), _b.lt(number, number_of(self.length)))

        t.require(Value(index.size, DType.BOOL, holds), self.error, self.message)

    def place(self, expr: Expr) -> Index:
        """Where an element of the index points."""
        return place_at(expr, self.length, wraps=self.wraps)


def out_of_bounds(x: Value, dim: int, *, wraps: bool, error: type[Exception]) -> Range:
    """The range of a dimension, with the usual message."""
    length = x.size[dim] if x.rank else Index.of(1)
    message = f"index is out of bounds for dimension {dim} with size {length}"
    return Range(length, wraps, error, message)


# --- one index a dimension ---


@dataclass(frozen=True, slots=True)
class Picked:
    """Index tensors of some dimensions of a tensor: what `x[:, i, j]` names."""

    x: Value
    indices: dict[int, Value]  # by dimension
    common: tuple[Index, ...]  # size of the index tensors, broadcast
    first: int  # where that size stands in the result

    @property
    def size(self) -> tuple[Index, ...]:
        """Size of what is named."""
        rest = [n for d, n in enumerate(self.x.size) if d not in self.indices]
        return (*rest[: self.first], *self.common, *rest[self.first :])

    def source(self, point: Point) -> Point:
        """Where in the tensor an element lies."""
        behind = self.first + len(self.common)
        chosen = point[self.first : behind]
        rest = iter((*point[: self.first], *point[behind:]))
        return tuple(
            place_at(
                broadcast(self.indices[d], self.common).load(chosen), self.x.size[d], wraps=True
            )
            if d in self.indices
            else next(rest)
            for d in range(self.x.rank)
        )

    def check(self, t: Builder) -> None:
        """Raise at run time where an index lies outside."""
        for dim, index in self.indices.items():
            out_of_bounds(self.x, dim, wraps=True, error=IndexError).check(t, index)


def picked(x: Value, indices: Sequence[Value | None]) -> Picked | None:
    """The index tensors of `x`; None where one is a mask."""
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if not given or any(v.dtype not in (DType.I64, DType.I32) for v in given.values()):
        return None
    dims = list(given)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    common = common_size([index.size for index in given.values()])
    return Picked(x, given, common, dims[0] if adjacent else 0)


def common_size(sizes: Sequence[tuple[Index, ...]]) -> tuple[Index, ...]:
    """The size that several broadcast to."""
    rank = max(len(size) for size in sizes)
    common = [Index.of(1)] * rank
    for size in sizes:
        for back, length in enumerate(reversed(size), 1):
            if length.constant != 1:
                common[-back] = length
    return tuple(common)


@lowers(aten.index.Tensor, exact=Exact.EVERYWHERE)
def index_tensor(
    t: Builder, result: Result, x: Value, indices: Sequence[Value | None]
) -> Value | None:
    """result[..., k, ...] = x[..., i[k], ..., j[k], ...]"""
    chosen = picked(x, indices)
    if chosen is None or not all(is_row_major(index) for index in chosen.indices.values()):
        return None
    chosen.check(t)
    source = settled(t, x, result.size)
    return Value(result.size, x.dtype, lambda p: source.load(chosen.source(p)))


@lowers(aten._unsafe_index.Tensor, exact=Exact.EVERYWHERE)
def unsafe_index(
    t: Builder, result: Result, x: Value, indices: Sequence[Value | None]
) -> Value | None:
    """The same of indices that are in range: they were computed to be."""
    chosen = picked(x, indices)
    if chosen is None:
        return None
    source = settled(t, x, result.size)
    return Value(result.size, x.dtype, lambda p: source.load(chosen.source(p)))


# --- one index for all ---


@lowers(aten.index_select.default, exact=Exact.EVERYWHERE)
def index_select(t: Builder, result: Result, x: Value, dim: int, index: Value) -> Value:
    """result[..., k, ...] = x[..., index[k], ...]"""
    dim = dim_of(dim, x)
    length = x.size[dim] if x.rank else Index.of(1)
    span = Range(length, False, IndexError, OUT_OF_RANGE)
    if dim:
        span = Range(length, False, RuntimeError, "INDICES element is out of DATA bounds")
    span.check(t, index)
    source = settled(t, x, result.size)

    def load(point: Point) -> Expr:
        if not x.rank:
            return source.load(())
        place = span.place(index.load((point[dim],) if index.rank else ()))
        return source.load(replaced(point, dim, place))

    return Value(result.size, x.dtype, load)


@lowers(aten.gather.default, exact=Exact.EVERYWHERE)
def gather(
    t: Builder, result: Result, x: Value, dim: int, index: Value, sparse_grad: bool = False
) -> Value:
    """result[i, j] = x[index[i, j], j]"""
    dim = dim_of(dim, x)
    span = out_of_bounds(x, dim, wraps=False, error=RuntimeError)
    span.check(t, index)
    source = settled(t, x, result.size)

    def load(point: Point) -> Expr:
        if not x.rank:
            return source.load(())
        place = span.place(index.load(point))
        return source.load(replaced(point, dim, place) if point else (place,))

    return Value(result.size, x.dtype, load)


@lowers(aten.embedding.default, exact=Exact.EVERYWHERE)
def embedding(t: Builder, result: Result, weight: Value, index: Value, *options: Any) -> Value:
    """result[..., j] = weight[index[...], j]"""
    span = Range(weight.size[0], False, IndexError, OUT_OF_RANGE)
    span.check(t, index)
    source = settled(t, weight, result.size)

    def load(point: Point) -> Expr:
        place = span.place(index.load(point[: index.rank]))
        return source.load((place, *point[index.rank :]))

    return Value(result.size, weight.dtype, load)


def flat_range(x: Value) -> Range:
    """What the number of an element may be."""
    count = product(x.size)
    message = f"out of range: tried to access an index on a tensor of {count} elements."
    return Range(count, True, IndexError, message)


@lowers(aten.take.default, exact=Exact.EVERYWHERE)
def take(t: Builder, result: Result, x: Value, index: Value) -> Value:
    """result[k] = x.flatten()[index[k]]"""
    span = flat_range(x)
    span.check(t, index)
    source = settled(t, x, result.size)

    def load(point: Point) -> Expr:
        return source.load(unflat(span.place(index.load(point)), x.size))

    return Value(result.size, x.dtype, load)
