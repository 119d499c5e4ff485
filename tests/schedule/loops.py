"""Loops made by hand: what the fuser and the rows are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stator.core.dtypes import DType
from stator.loops.build import apply
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Combine, Expr
from stator.loops.prims import Prim
from stator.loops.values import Point, Value
from stator.lower.items import Compute
from stator.lower.tensors import axes_of, contiguous, extent, point_of, stored

Size = Sequence[int | Index]


def sizes(size: Size) -> tuple[Index, ...]:
    return tuple(Index.of(n) for n in size)


def tensor(name: str, *size: int | Index, stride: Size | None = None) -> Value:
    """A tensor in memory."""
    own = sizes(size)
    steps = contiguous(own) if stride is None else sizes(stride)
    return stored(Buffer(name, DType.F32, extent(own, steps)), own, steps)


def result_of(loop: Compute) -> Value:
    """What a loop leaves in memory."""
    return stored(loop.buffer, loop.size, loop.stride)


def mapped(
    name: str, size: Size, value: Callable[[Point], Expr], stride: Size | None = None
) -> Compute:
    """A loop that computes each element by itself."""
    own = sizes(size)
    steps = contiguous(own) if stride is None else sizes(stride)
    outer = axes_of(name, "o", own)
    buffer = Buffer(name, DType.F32, extent(own, steps))
    return Compute(buffer, own, steps, outer, (), None, value(point_of(outer)))


def reduced(
    name: str,
    size: Size,
    inner: Size,
    value: Callable[[Point, Point], Expr],
    combine: Combine = Combine.SUM,
) -> Compute:
    """A loop that reduces."""
    own, axes = sizes(size), axes_of(name, "r", sizes(inner))
    outer = axes_of(name, "o", own)
    buffer = Buffer(name, DType.F32, extent(own, contiguous(own)))
    total = value(point_of(outer), point_of(axes))
    return Compute(buffer, own, contiguous(own), outer, axes, combine, total)


def scanned(name: str, source: Value, dim: int) -> Compute:
    """Running sums along a dimension."""
    plain = mapped(name, source.size, source.load)
    return replace(plain, combine=Combine.SUM, scan=plain.outer[dim])


def row_sum(name: str, source: Value) -> Compute:
    """The sum over the last dimension."""
    return reduced(name, source.size[:-1], source.size[-1:], lambda p, r: source.load((*p, *r)))


def added(first: Expr, second: Expr) -> Expr:
    return apply(Prim.ADD, first, second)


def along(axes: Sequence[Axis]) -> list[str]:
    """Names of axes without those of their loops: `o0`, `r1`."""
    return [axis.name.rsplit("_", 1)[1] for axis in axes]
