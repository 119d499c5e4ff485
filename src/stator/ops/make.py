"""Tensors from nothing, and copies: full, arange, eye, conversions.

Where a result lies, its fake tensor says: lowering asks no rule for one that its kernels do not
reach.  Memory that is pinned is torch's to make.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.half import converted
from stator.loops.index import Index
from stator.loops.ir import Expr, IndexValue, within
from stator.loops.values import Builder, Point, Result, Value, broadcast
from stator.ops.arguments import as_index, scalar
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()

EXACT: Final = 1 << 53  # integers below are exact as floats


@lowers(aten._to_copy.default, exact=Exact.EVERYWHERE)
def to_copy(t: Builder, result: Result, x: Value, **options: Any) -> Value | None:
    """x in another type.  A conversion that was asked for rounds, even where nobody stores it."""
    return None if options.get("pin_memory") else converted(x, result.dtype)


@lowers(aten.clone.default, exact=Exact.EVERYWHERE)
def clone(t: Builder, result: Result, x: Value, memory_format: Any = None) -> Value:
    """x, in memory of its own once somebody needs that."""
    return Value(result.size, x.dtype, x.load)


@lowers(aten.copy.default, exact=Exact.EVERYWHERE)
def copy(t: Builder, result: Result, x: Value, source: Value, non_blocking: bool = False) -> Value:
    """source, in the size and type of x."""
    return converted(broadcast(source, result.size), result.dtype)


@lowers(aten.full.default, exact=Exact.EVERYWHERE)
def full(t: Builder, result: Result, size: Any, value: Any, **options: Any) -> Value | None:
    """One number everywhere."""
    number = scalar(value, result.dtype.computed_in)
    if number is None or options.get("pin_memory"):
        return None
    return Value(result.size, result.dtype, lambda _: number)


@lowers(aten.full_like.default, aten.fill.Scalar, exact=Exact.EVERYWHERE)
def full_like(t: Builder, result: Result, x: Any, value: Any, **options: Any) -> Value | None:
    """One number everywhere, in the size of x."""
    return full(t, result, None, value, **options)


@lowers(aten.new_full.default, exact=Exact.EVERYWHERE)
def new_full(
    t: Builder, result: Result, x: Any, size: Any, value: Any, **options: Any
) -> Value | None:
    """One number everywhere, in the type of x."""
    return full(t, result, None, value, **options)


@lowers(aten.fill.Tensor, exact=Exact.EVERYWHERE)
def fill(t: Builder, result: Result, x: Value, value: Value) -> Value:
    """The one element of value everywhere, in the size of x."""
    return Value(result.size, result.dtype, lambda _: cast(value.load(()), x.dtype.computed_in))


@lowers(aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default, exact=Exact.EVERYWHERE)
def zeros(t: Builder, result: Result, *args: Any, **options: Any) -> Value | None:
    """0 everywhere."""
    return full(t, result, None, 0, **options)


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    exact=Exact.EVERYWHERE,
)
def empty(t: Builder, result: Result, *args: Any, **options: Any) -> Value | None:
    """Anything everywhere; zeros cost nothing unless somebody reads them."""
    return full(t, result, None, 0, **options)


@lowers(aten.ones_like.default, aten.ones.default, aten.new_ones.default, exact=Exact.EVERYWHERE)
def ones(t: Builder, result: Result, *args: Any, **options: Any) -> Value | None:
    """1 everywhere."""
    return full(t, result, None, 1, **options)


@lowers(aten.scalar_tensor.default, exact=Exact.EVERYWHERE)
def scalar_tensor(t: Builder, result: Result, value: Any, **options: Any) -> Value | None:
    """A number as a tensor."""
    return full(t, result, None, value, **options)


@lowers(aten.eye.default, aten.eye.m, exact=Exact.EVERYWHERE)
def eye(t: Builder, result: Result, *sizes: Any, **options: Any) -> Value | None:
    """1 where i == j, else 0"""
    if options.get("pin_memory"):
        return None
    kind = result.dtype.computed_in
    one, zero = const(1, kind), const(0, kind)
    return Value(result.size, result.dtype, lambda p: within(p[1] - p[0], Index.of(1), one, zero))


def _whole(value: Any) -> Any:
    """A float that is an integer as one."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    return int(value) if is_whole else value


@lowers(aten.arange.start_step, exact=Exact.INTEGERS)
def arange(
    t: Builder, result: Result, start: Any, end: Any, step: Any = 1, **options: Any
) -> Value | None:
    """start + step * i"""
    if options.get("pin_memory"):
        return None
    kind = result.dtype.computed_in
    first, each = as_index(_whole(start)), as_index(_whole(step))
    if first is not None and each is not None:
        begin, stride = first, each
        return Value(result.size, result.dtype, lambda p: IndexValue(kind, p[0] * stride + begin))
    if not kind.is_float or not all(isinstance(n, int | float) for n in (start, step)):
        return None

    def load(point: Point) -> Expr:
        wide = _b.add(_b.mul(IndexValue(DType.F64, point[0]), float(step)), float(start))
        return cast(wide, kind)

    return Value(result.size, result.dtype, load)


@lowers(aten.arange.default, exact=Exact.INTEGERS)
def arange_to(t: Builder, result: Result, end: Any, **options: Any) -> Value | None:
    """i"""
    return arange(t, result, 0, end, **options)


@lowers(aten.arange.start, exact=Exact.INTEGERS)
def arange_from(t: Builder, result: Result, start: Any, end: Any, **options: Any) -> Value | None:
    """start + i"""
    return arange(t, result, start, end, **options)


@lowers(aten.linspace.default)
def linspace(
    t: Builder, result: Result, start: Any, end: Any, steps: Any, **options: Any
) -> Value | None:
    """start + i * step in the first half, end - (steps - 1 - i) * step in the second"""
    kind = result.dtype.computed_in
    plain = all(isinstance(n, int | float) for n in (start, end)) and not options.get("pin_memory")
    if not (plain and kind.is_float and isinstance(steps, int)):
        return None
    step = (float(end) - float(start)) / max(steps - 1, 1)

    def load(point: Point) -> Expr:
        up = _b.mul(IndexValue(DType.F64, point[0]), step)
        down = _b.mul(IndexValue(DType.F64, steps - 1 - point[0]), step)
        rising = cast(_b.add(up, float(start)), kind)
        falling = cast(_b.sub(const(float(end), DType.F64), down), kind)
        return within(point[0], Index.of(steps // 2 if steps > 1 else 1), rising, falling)

    return Value(result.size, result.dtype, load)
