"""Windows as columns: im2col, and col2im, which adds them up again."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch

from stator.loops.build import cast, const
from stator.loops.index import Index
from stator.loops.ir import Expr
from stator.loops.values import Builder, Point, Result, Value, flat, unflat
from stator.ops.table import Exact, lowers
from stator.ops.window import MOST_UNROLLED, Sliding, added, guarded, sliding

aten = torch.ops.aten


def _windows(lengths: Any, how: tuple[Any, ...]) -> list[Sliding] | None:
    """Windows over two dimensions, and how many there are of them."""
    size, apart, before, step = how
    found = sliding(lengths, lengths, size, step, before, apart)
    if found is None:
        return None
    return [Sliding(w.length, _count(w), w.size, w.step, w.before, w.apart) for w in found]


def _count(window: Sliding) -> Index:
    span = (window.size - 1) * window.apart + 1
    return (window.length + 2 * window.before - span) // window.step + 1


@lowers(aten.im2col.default, exact=Exact.EVERYWHERE)
def im2col(t: Builder, result: Result, x: Value, *how: Any) -> Value | None:
    """result[n, (c, i, j), (h, w)] = x[n, c, h * step - before + i * apart, ...], 0 outside"""
    windows = _windows(x.size[-2:], how)
    if windows is None:
        return None
    zero = const(0, x.dtype.computed_in)
    inside = (x.size[-3], *(Index.of(window.size) for window in windows))
    counts = [window.count for window in windows]

    def load(point: Point) -> Expr:
        *batch, row, column = point
        channel, *offset = unflat(row, inside)
        pairs = list(zip(windows, unflat(column, counts), offset, strict=True))
        source = (window.source(place, ahead) for window, place, ahead in pairs)
        bounds = [window.holds(place, ahead) for window, place, ahead in pairs]
        return guarded(x.load((*batch, channel, *source)), bounds, zero)

    return Value(result.size, x.dtype, load)


@lowers(aten.col2im.default)
def col2im(t: Builder, result: Result, x: Value, size: Any, *how: Any) -> Value | None:
    """result[n, c, y, x] = sum of all columns that im2col would fill from there"""
    windows = _windows(result.size[-2:], how)
    if windows is None or prod(window.reach for window in windows) > MOST_UNROLLED:
        return None
    kind = result.dtype.computed_in
    inside = (result.size[-3], *(Index.of(window.size) for window in windows))
    counts = [window.count for window in windows]

    def term(point: Point, numbers: tuple[int, ...]) -> Expr:
        *batch, channel, _, _ = point
        pairs = zip(windows, point[-2:], numbers, strict=True)
        found = [(w, w.covering(index, number)) for w, index, number in pairs]
        offset = [seen.covers[0] // window.apart for window, seen in found]
        row = flat((channel, *offset), inside)
        column = flat([seen.place for _, seen in found], counts)
        bounds = [bound for _, seen in found for bound in (seen.exists, seen.covers)]
        bounds += [(seen.covers[0] % window.apart, Index.of(1)) for window, seen in found]
        return guarded(cast(x.load((*batch, row, column)), kind), bounds, const(0, kind))

    def load(point: Point) -> Expr:
        choices = product(*(range(window.reach) for window in windows))
        return added([term(point, numbers) for numbers in choices])

    return Value(result.size, result.dtype, load)
