"""Views as index maps: they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stator.loops.index import Index
from stator.loops.ir import Expr
from stator.loops.values import Builder, Point, Result, Value, broadcast, flat, unflat
from stator.ops.table import view

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


@view(aten.slice.Tensor)
def slice_(t: Builder, result: Result, x: Value, dim: int = 0, *bounds: Any) -> Value | None:
    """Every step-th element of a dimension, from start."""
    given: list[Any] = [*bounds, *(None, None, 1)[len(bounds) :]]
    start, _, step = given
    length = x.size[dim].constant
    if length is None:
        return None
    first = 0 if start is None else max(0, min(length, start + length if start < 0 else start))

    def load(point: Point) -> Expr:
        source = list(point)
        source[dim] = source[dim] * step + first
        return x.load(tuple(source))

    return Value(result.size, x.dtype, load)


@view(aten.select.int)
def select(t: Builder, result: Result, x: Value, dim: int, index: int) -> Value | None:
    """One position of a dimension."""
    length = x.size[dim].constant
    if length is None:
        return None
    dim, index = dim % x.rank, index % length

    def load(point: Point) -> Expr:
        return x.load((*point[:dim], Index.of(index), *point[dim:]))

    return Value(result.size, x.dtype, load)
