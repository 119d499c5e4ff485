"""Tensors side by side: cat, stack, block_diag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from stator.loops.build import const
from stator.loops.half import converted
from stator.loops.index import Index
from stator.loops.ir import Expr, within
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import load_inside
from stator.ops.table import Exact, lowers

aten = torch.ops.aten


def choose(place: Index, sizes: Sequence[Index], values: Sequence[Callable[[Index], Expr]]) -> Expr:
    """The value of the part that `place` falls into, at its place there: halves, then quarters."""
    if len(values) == 1:
        return values[0](place)
    half = len(values) // 2
    first = sum(sizes[:half], Index.of(0))
    return within(
        place,
        first,
        choose(place, sizes[:half], values[:half]),
        choose(place - first, sizes[half:], values[half:]),
    )


@lowers(aten.cat.default, exact=Exact.EVERYWHERE)
def cat(t: Builder, result: Result, tensors: Sequence[Value], dim: int = 0) -> Value:
    """result[i] = tensors[n][i - size[0] - ... - size[n - 1]]"""
    dim = dim % len(result.size)
    # One without elements may have one dimension.
    parts = [converted(x, result.dtype) for x in tensors if x.rank == len(result.size)]

    def load(point: Point) -> Expr:
        def reader(x: Value) -> Callable[[Index], Expr]:
            return lambda place: load_inside(x, point, dim, place)

        return choose(point[dim], [x.size[dim] for x in parts], [reader(x) for x in parts])

    return Value(result.size, result.dtype, load)


@lowers(aten.stack.default, exact=Exact.EVERYWHERE)
def stack(t: Builder, result: Result, tensors: Sequence[Value], dim: int = 0) -> Value:
    """result[..., n, ...] = tensors[n]"""
    dim = dim % len(result.size)
    parts = [converted(x, result.dtype) for x in tensors]

    def load(point: Point) -> Expr:
        def reader(x: Value) -> Callable[[Index], Expr]:
            return lambda place: x.load((*point[:dim], *point[dim + 1 :]))

        return choose(point[dim], [Index.of(1)] * len(parts), [reader(x) for x in parts])

    return Value(result.size, result.dtype, load)


@lowers(aten.block_diag.default, exact=Exact.EVERYWHERE)
def block_diag(t: Builder, result: Result, tensors: Sequence[Value]) -> Value:
    """Matrices along the diagonal, zeros elsewhere."""
    kind = result.dtype.computed_in
    blocks = [_as_matrix(converted(x, result.dtype)) for x in tensors]
    lefts = [Index.of(0), *accumulate(block.size[1] for block in blocks)]

    def load(point: Point) -> Expr:
        def reader(block: Value, left: Index) -> Callable[[Index], Expr]:
            def at(row: Index) -> Expr:
                column = point[1] - left
                value = block.load((row, column))
                return within(column, block.size[1], value, const(0, kind))

            return at

        rows = [reader(block, left) for block, left in zip(blocks, lefts, strict=False)]
        return choose(point[0], [block.size[0] for block in blocks], rows)

    return Value(result.size, result.dtype, load)


def _as_matrix(x: Value) -> Value:
    """A number as a matrix of one element, a vector as one row."""
    missing = 2 - x.rank
    size = (*[Index.of(1)] * missing, *x.size)
    return Value(size, x.dtype, lambda point: x.load(point[missing:]))
