"""Views as index maps: they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize
from typing import Any

import torch

from stator.loops.index import Index, is_at_least
from stator.loops.ir import Expr
from stator.loops.values import Builder, Point, Result, Value, broadcast, flat, unflat
from stator.ops.arguments import as_index, dim_of, replaced
from stator.ops.table import Exact, lowers, view

aten = torch.ops.aten


@view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def reshape(t: Builder, result: Result, x: Value, size: Any = None) -> Value:
    """Element n of the result is element n of x."""

    def load(point: Point) -> Expr:
        return x.load(unflat(flat(point, result.size), x.size))

    return Value(result.size, x.dtype, load)


@view(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def insert_or_drop_ones(t: Builder, result: Result, x: Value, dim: Any = None) -> Value:
    """The same elements, in the same order."""
    return reshape(t, result, x)


@view(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def same(t: Builder, result: Result, x: Value) -> Value:
    """x"""
    return x


@view(aten.expand.default)
def expand(t: Builder, result: Result, x: Value, size: Any, implicit: bool = False) -> Value:
    """x, repeated along sizes of 1."""
    return broadcast(x, result.size)


@view(aten.permute.default)
def permute(t: Builder, result: Result, x: Value, dims: Sequence[int]) -> Value:
    """Dimension d of the result is dimension dims[d] of x."""

    def load(point: Point) -> Expr:
        source = [Index.of(0)] * x.rank
        for index, dim in zip(point, dims, strict=True):
            source[dim % x.rank] = index
        return x.load(tuple(source))

    return Value(result.size, x.dtype, load)


@view(aten.transpose.int)
def transpose(t: Builder, result: Result, x: Value, a: int, b: int) -> Value:
    """Two dimensions swapped."""
    order = list(range(x.rank))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(t, result, x, order)


@view(aten.t.default)
def t_(t: Builder, result: Result, x: Value) -> Value:
    """The transposed matrix."""
    return permute(t, result, x, list(reversed(range(x.rank))))


def first_of(length: Index, start: Any, end: Any, step: Any, count: Index) -> Index | None:
    """Where a slice of `count` elements begins; None if that is not known.

    A start beyond the end needs no care: then there are no elements.
    """
    if not isinstance(step, int):
        return None
    if start is None:
        return Index.of(0)
    begin = as_index(start)
    if begin is None:
        return None
    if length.constant is not None and begin.constant is not None:
        low = begin.constant + (length.constant if begin.constant < 0 else 0)
        return Index.of(max(0, min(length.constant, low)))
    if is_at_least(begin, 0):
        return begin
    if begin.constant is not None and is_at_least(length + begin, 0):
        return length + begin
    to_the_end = end is None or (isinstance(end, int) and end == maxsize)
    return length - count if to_the_end and step == 1 else None


def slice_bounds(given: Sequence[Any]) -> list[Any]:
    """Start, end and step, where the last ones may be left out."""
    return [*given, *(None, None, 1)[len(given) :]]


@view(aten.slice.Tensor)
def slice_(t: Builder, result: Result, x: Value, dim: int = 0, *bounds: Any) -> Value | None:
    """result[i] = x[first + step * i]"""
    start, end, step = slice_bounds(bounds)
    dim = dim_of(dim, x)
    first = first_of(x.size[dim], start, end, step, result.size[dim])
    if first is None:
        return None
    begin = first

    def load(point: Point) -> Expr:
        return x.load(replaced(point, dim, point[dim] * step + begin))

    return Value(result.size, x.dtype, load)


def place_in(length: Index, index: Any) -> Index | None:
    """A position counted from the front; None if it is not known which end it counts from."""
    place = as_index(index)
    if place is None or is_at_least(place, 0):
        return place
    return length + place if is_at_least(-place, 1) else None


@view(aten.select.int)
def select(t: Builder, result: Result, x: Value, dim: int, index: Any) -> Value | None:
    """result[...] = x[..., index, ...]"""
    dim = dim_of(dim, x)
    place = place_in(x.size[dim], index)
    if place is None:
        return None
    there = place

    def load(point: Point) -> Expr:
        return x.load((*point[:dim], there, *point[dim:]))

    return Value(result.size, x.dtype, load)


def on_diagonal(point: Point, offset: int, first: int, second: int) -> Point:
    """The point of a matrix for one of its diagonal, which stands in the last dimension."""
    *others, along = point
    places = {first: along - min(offset, 0), second: along + max(offset, 0)}
    rest = iter(others)
    return tuple(places[d] if d in places else next(rest) for d in range(len(point) + 1))


@view(aten.diagonal.default)
def diagonal(
    t: Builder, result: Result, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """result[..., i] = x[..., i, ..., i + offset, ...]"""
    first, second = dim1 % x.rank, dim2 % x.rank

    def load(point: Point) -> Expr:
        return x.load(on_diagonal(point, offset, first, second))

    return Value(result.size, x.dtype, load)


@view(aten.unfold.default)
def unfold(t: Builder, result: Result, x: Value, dim: int, size: Any, step: Any) -> Value | None:
    """result[..., w, ..., k] = x[..., w * step + k, ...]"""
    stride = as_index(step)
    if stride is None:
        return None
    if x.rank == 0:
        return Value(result.size, x.dtype, lambda point: x.load(()))
    dim, wide = dim_of(dim, x), stride

    def load(point: Point) -> Expr:
        *window, inside = point
        return x.load(replaced(tuple(window), dim, window[dim] * wide + inside))

    return Value(result.size, x.dtype, load)


@view(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(
    t: Builder, result: tuple[Result, ...], x: Value, sizes: Any, dim: int = 0
) -> tuple[Value, ...]:
    """result[n][i] = x[size[0] + ... + size[n - 1] + i]"""
    dim = dim_of(dim, x)
    parts, first = [], Index.of(0)
    for part in result:
        parts.append(_shifted(x, part, dim, first))
        first = first + part.size[dim]
    return tuple(parts)


def _shifted(x: Value, part: Result, dim: int, first: Index) -> Value:
    def load(point: Point) -> Expr:
        return x.load(replaced(point, dim, point[dim] + first))

    return Value(part.size, x.dtype, load)


@view(aten.unbind.int)
def unbind(
    t: Builder, result: tuple[Result, ...], x: Value, dim: int = 0
) -> tuple[Value | None, ...]:
    """result[n][...] = x[..., n, ...]"""
    return tuple(select(t, part, x, dim, n) for n, part in enumerate(result))


# The same as copies: they appear where a composite operator asks for one.
lowers(aten.diagonal_copy.default, exact=Exact.EVERYWHERE)(diagonal)
lowers(aten.expand_copy.default, exact=Exact.EVERYWHERE)(expand)
lowers(aten.permute_copy.default, exact=Exact.EVERYWHERE)(permute)
lowers(aten.transpose_copy.int, exact=Exact.EVERYWHERE)(transpose)
lowers(aten.t_copy.default, exact=Exact.EVERYWHERE)(t_)
lowers(aten.slice_copy.Tensor, exact=Exact.EVERYWHERE)(slice_)
lowers(aten.select_copy.int, exact=Exact.EVERYWHERE)(select)
lowers(aten.unfold_copy.default, exact=Exact.EVERYWHERE)(unfold)
lowers(aten.view_copy.default, exact=Exact.EVERYWHERE)(reshape)
lowers(aten.unsqueeze_copy.default, aten.squeeze_copy.default, exact=Exact.EVERYWHERE)(
    insert_or_drop_ones
)
lowers(aten.squeeze_copy.dim, aten.squeeze_copy.dims, exact=Exact.EVERYWHERE)(insert_or_drop_ones)
lowers(
    aten.alias_copy.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    exact=Exact.EVERYWHERE,
)(same)
lowers(aten.unbind_copy.int, exact=Exact.EVERYWHERE)(unbind)
