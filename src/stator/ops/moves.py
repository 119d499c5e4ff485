"""Elements in another place: flip, roll, repeat, shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from stator.loops.index import Index
from stator.loops.ir import Expr, within
from stator.loops.values import Builder, Point, Result, Value, flat, product, unflat
from stator.ops.arguments import as_index, dim_of, is_row_major, load_inside, replaced
from stator.ops.table import Exact, lowers

aten = torch.ops.aten

MOST_SEAMS: Final = 2  # dimensions that a roll cuts in two; each doubles the loads


@lowers(aten.flip.default, exact=Exact.EVERYWHERE)
def flip(t: Builder, result: Result, x: Value, dims: Sequence[int]) -> Value:
    """result[i] = x[n - 1 - i]"""
    turned = {dim_of(dim, x) for dim in dims}

    def load(point: Point) -> Expr:
        return x.load(tuple(x.size[d] - 1 - i if d in turned else i for d, i in enumerate(point)))

    return Value(result.size, x.dtype, load)


@lowers(aten.rot90.default, exact=Exact.EVERYWHERE)
def rot90(t: Builder, result: Result, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    """A quarter turn, k times: both dimensions flipped, or swapped and one of them flipped."""
    first, second = (dim_of(dim, x) for dim in dims)
    turned = ((), (second,), (first, second), (first,))[k % 4]

    def load(point: Point) -> Expr:
        source = list(point)
        if k % 2:
            source[first], source[second] = source[second], source[first]
        for dim in turned:
            source[dim] = x.size[dim] - 1 - source[dim]
        return x.load(tuple(source))

    return Value(result.size, x.dtype, load)


@lowers(aten.roll.default, exact=Exact.EVERYWHERE)
def roll(
    t: Builder, result: Result, x: Value, shifts: Any, dims: Sequence[int] = ()
) -> Value | None:
    """result[i] = x[(i - shift) % n]"""
    steps = [as_index(shift) for shift in ([shifts] if isinstance(shifts, int) else shifts)]
    if any(step is None for step in steps):
        return None
    known = [step for step in steps if step is not None]
    if not dims:
        line = Value((product(x.size),), x.dtype, lambda p: x.load(unflat(p[0], x.size)))
        rolled = _rolled(line, 0, known[0], cut=True)
        return Value(result.size, x.dtype, lambda p: rolled.load((flat(p, x.size),)))
    moved = x
    for dim, step in zip(dims, known, strict=True):
        moved = _rolled(moved, dim_of(dim, x), step, cut=len(known) <= MOST_SEAMS)
    return moved


def _rolled(x: Value, dim: int, shift: Index, *, cut: bool) -> Value:
    """`x` rolled along one dimension: as two pieces, or by remainders."""
    if x.rank == 0:
        return x
    length = x.size[dim]
    if not cut or length.constant is None or shift.constant is None:
        by_remainder = lambda p: x.load(replaced(p, dim, (p[dim] - shift) % length))  # noqa: E731
        return Value(x.size, x.dtype, by_remainder)
    first = shift.constant % length.constant

    def load(point: Point) -> Expr:
        place = point[dim] - first
        behind = load_inside(x, point, dim, place + length)
        return within(place, length, load_inside(x, point, dim, place), behind)

    return Value(x.size, x.dtype, load)


@lowers(aten.repeat.default, exact=Exact.EVERYWHERE)
def repeat(t: Builder, result: Result, x: Value, repeats: Any) -> Value:
    """result[i] = x[i % n]"""
    new = len(result.size) - x.rank

    def load(point: Point) -> Expr:
        return x.load(tuple(i % n for i, n in zip(point[new:], x.size, strict=True)))

    return Value(result.size, x.dtype, load)


@lowers(aten.pixel_shuffle.default, exact=Exact.EVERYWHERE)
def pixel_shuffle(t: Builder, result: Result, x: Value, factor: int) -> Value:
    """result[c, h * r + i, w * r + j] = x[c * r * r + i * r + j, h, w]"""

    def load(point: Point) -> Expr:
        *batch, channel, row, column = point
        place = flat((channel, row % factor, column % factor), [Index.of(factor)] * 3)
        return x.load((*batch, place, row // factor, column // factor))

    return Value(result.size, x.dtype, load)


@lowers(aten.pixel_unshuffle.default, exact=Exact.EVERYWHERE)
def pixel_unshuffle(t: Builder, result: Result, x: Value, factor: int) -> Value:
    """result[c * r * r + i * r + j, h, w] = x[c, h * r + i, w * r + j]"""

    def load(point: Point) -> Expr:
        *batch, place, row, column = point
        size = [x.size[-3], Index.of(factor), Index.of(factor)]
        channel, down, right = unflat(place, size)
        return x.load((*batch, channel, row * factor + down, column * factor + right))

    return Value(result.size, x.dtype, load)


@lowers(aten.channel_shuffle.default, exact=Exact.EVERYWHERE)
def channel_shuffle(t: Builder, result: Result, x: Value, groups: int) -> Value | None:
    """result[:, k * groups + g] = x[:, g * (channels / groups) + k]"""
    if not is_row_major(x):
        return None
    width = x.size[1] // groups

    def load(point: Point) -> Expr:
        group, place = point[1] % groups, point[1] // groups
        return x.load(replaced(point, 1, group * width + place))

    return Value(result.size, x.dtype, load)
