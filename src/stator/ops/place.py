"""A part in its place in a whole: backwards of views, copies with one part replaced, triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from stator.loops.build import cast, const
from stator.loops.index import Index
from stator.loops.ir import Expr, within
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import load_inside, replaced
from stator.ops.table import Exact, lowers
from stator.ops.views import first_of, place_in, slice_bounds
from stator.ops.window import MOST_UNROLLED, added

aten = torch.ops.aten

Around: TypeAlias = Callable[[Point], Expr]  # what stands where the part does not reach


def _zeros(result: Result) -> Around:
    zero = const(0, result.dtype.computed_in)
    return lambda point: zero


def _copied(x: Value, result: Result) -> Around:
    return lambda point: cast(x.load(point), result.dtype.computed_in)


def _in_slice(result: Result, part: Value, around: Around, dim: int, bounds: Any) -> Value | None:
    start, end, step = bounds
    dim = dim % len(result.size)
    count = part.size[dim]
    first = first_of(result.size[dim], start, end, step, count)
    if first is None:
        return None
    begin, kind = first, result.dtype.computed_in

    def load(point: Point) -> Expr:
        ahead = point[dim] - begin
        value = cast(load_inside(part, point, dim, ahead // step), kind)
        outside = around(point)
        return within(
            ahead % step, Index.of(1), within(ahead // step, count, value, outside), outside
        )

    return Value(result.size, result.dtype, load)


@lowers(aten.slice_backward.default, exact=Exact.EVERYWHERE)
def slice_backward(
    t: Builder, result: Result, grad: Value, sizes: Any, dim: int, *bounds: Any
) -> Value | None:
    """result[first + step * i] = grad[i], 0 elsewhere"""
    return _in_slice(result, grad, _zeros(result), dim, bounds)


@lowers(aten.slice_scatter.default, exact=Exact.EVERYWHERE)
def slice_scatter(
    t: Builder, result: Result, x: Value, source: Value, dim: int = 0, *bounds: Any
) -> Value | None:
    """result[first + step * i] = source[i], x elsewhere"""
    return _in_slice(result, source, _copied(x, result), dim, slice_bounds(bounds))


def _at_place(result: Result, part: Value, around: Around, dim: int, index: Any) -> Value | None:
    dim = dim % len(result.size)
    place = place_in(result.size[dim], index)
    if place is None:
        return None
    there, kind = place, result.dtype.computed_in

    def load(point: Point) -> Expr:
        value = cast(part.load((*point[:dim], *point[dim + 1 :])), kind)
        return within(point[dim] - there, Index.of(1), value, around(point))

    return Value(result.size, result.dtype, load)


@lowers(aten.select_backward.default, exact=Exact.EVERYWHERE)
def select_backward(
    t: Builder, result: Result, grad: Value, sizes: Any, dim: int, index: Any
) -> Value | None:
    """result[..., index, ...] = grad, 0 elsewhere"""
    return _at_place(result, grad, _zeros(result), dim, index)


@lowers(aten.select_scatter.default, exact=Exact.EVERYWHERE)
def select_scatter(
    t: Builder, result: Result, x: Value, source: Value, dim: int, index: Any
) -> Value | None:
    """result[..., index, ...] = source, x elsewhere"""
    return _at_place(result, source, _copied(x, result), dim, index)


def _on_diagonal(
    result: Result, part: Value, around: Around, offset: int, dims: tuple[int, int]
) -> Value:
    first, second = (dim % len(result.size) for dim in dims)
    kind = result.dtype.computed_in

    def load(point: Point) -> Expr:
        along = point[first] if offset >= 0 else point[second]
        others = [i for d, i in enumerate(point) if d not in (first, second)]
        value = cast(part.load((*others, along)), kind)
        apart = point[second] - point[first] - offset
        return within(apart, Index.of(1), value, around(point))

    return Value(result.size, result.dtype, load)


@lowers(aten.diagonal_backward.default, exact=Exact.EVERYWHERE)
def diagonal_backward(
    t: Builder, result: Result, grad: Value, sizes: Any, offset: int, *dims: Any
) -> Value:
    """result[..., i, ..., i + offset, ...] = grad[..., i], 0 elsewhere"""
    return _on_diagonal(result, grad, _zeros(result), offset, (dims[0], dims[1]))


@lowers(aten.diag_embed.default, exact=Exact.EVERYWHERE)
def diag_embed(
    t: Builder, result: Result, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Value:
    """result[..., i, ..., i + offset, ...] = x[..., i], 0 elsewhere"""
    return _on_diagonal(result, x, _zeros(result), offset, (dim1, dim2))


@lowers(aten.diagonal_scatter.default, exact=Exact.EVERYWHERE)
def diagonal_scatter(
    t: Builder, result: Result, x: Value, source: Value, offset: int = 0, *dims: Any
) -> Value:
    """result[..., i, ..., i + offset, ...] = source[..., i], x elsewhere"""
    given: list[Any] = [*dims, *(0, 1)[len(dims) :]]
    first, second = given
    return _on_diagonal(result, source, _copied(x, result), offset, (first, second))


@lowers(aten.unfold_backward.default)
def unfold_backward(
    t: Builder, result: Result, grad: Value, sizes: Any, dim: int, *window: Any
) -> Value | None:
    """result[i] = sum of grad[w, k] over all w * step + k == i"""
    size, step = window
    if not result.size:
        return Value((), result.dtype, lambda point: grad.load((Index.of(0),)))
    if not (isinstance(size, int) and isinstance(step, int)):
        return None
    dim = dim % len(result.size)
    kind = result.dtype.computed_in
    count = -(-size // step)  # windows that an element may lie in
    if count > MOST_UNROLLED:
        return None

    def load(point: Point) -> Expr:
        terms = []
        for back in reversed(range(count)):
            place, inside = point[dim] // step - back, point[dim] % step + back * step
            value = cast(grad.load((*replaced(point, dim, place), inside)), kind)
            value = within(inside, Index.of(size), value, const(0, kind))
            terms.append(within(place, grad.size[dim], value, const(0, kind)))
        return added(terms)

    return Value(result.size, result.dtype, load)


@lowers(aten.tril.default, exact=Exact.EVERYWHERE)
def tril(t: Builder, result: Result, x: Value, diagonal: Any = 0) -> Value | None:
    """x[i, j] where j - i <= diagonal, else 0"""
    if not isinstance(diagonal, int):
        return None
    zero = const(0, x.dtype.computed_in)

    def load(point: Point) -> Expr:
        row, column = point[-2:]
        most = x.size[-2] + max(diagonal, 0)
        return within(row - column + diagonal, most, x.load(point), zero)

    return Value(result.size, x.dtype, load)


@lowers(aten.triu.default, exact=Exact.EVERYWHERE)
def triu(t: Builder, result: Result, x: Value, diagonal: Any = 0) -> Value | None:
    """x[i, j] where j - i >= diagonal, else 0"""
    if not isinstance(diagonal, int):
        return None
    zero = const(0, x.dtype.computed_in)

    def load(point: Point) -> Expr:
        row, column = point[-2:]
        most = x.size[-1] + max(-diagonal, 0)
        return within(column - row - diagonal, most, x.load(point), zero)

    return Value(result.size, x.dtype, load)
