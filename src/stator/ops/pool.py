"""Pooling: the largest element or the mean of each window, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any, Final, TypeAlias

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.half import rounded
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Updates, Value, flat, unflat
from stator.ops.arguments import probe, settled
from stator.ops.index import place_at
from stator.ops.rising import Rising
from stator.ops.table import lowers
from stator.ops.window import (
    MOST_UNROLLED,
    Sliding,
    Window,
    adaptive,
    added,
    guarded,
    offsets,
    sliding,
)

aten = torch.ops.aten
_b = Body()

MOST_GATHERED: Final = 9  # windows whose gradients are looked up; more are scattered
FAR: Final = (1 << 62) - 1  # beyond every position

Pair: TypeAlias = tuple[Value, Value]


@dataclass(frozen=True, slots=True)
class Pool:
    """Windows over the last dimensions of a tensor."""

    x: Value
    windows: Sequence[Window]
    outside: Expr  # what stands where a window reaches over the border

    @property
    def batch(self) -> int:
        """Dimensions before those with windows."""
        return self.x.rank - len(self.windows)

    @property
    def count(self) -> int:
        """Elements of a window."""
        return prod(window.most for window in self.windows)

    def source(self, point: Point, offset: Point) -> Point:
        """Where the element at an offset of a window lies, in the dimensions with windows."""
        places = zip(self.windows, point[self.batch :], offset, strict=True)
        return tuple(window.source(place, ahead) for window, place, ahead in places)

    def guard(self, point: Point, offset: Point, value: Expr, outside: Expr) -> Expr:
        """`value`, where there is such an element."""
        places = zip(self.windows, point[self.batch :], offset, strict=True)
        return guarded(value, [w.holds(place, ahead) for w, place, ahead in places], outside)

    def term(self, point: Point, offset: Point) -> Expr:
        """The element at an offset of a window."""
        source = (*point[: self.batch], *self.source(point, offset))
        value = cast(self.x.load(source), self.outside.dtype)
        return self.guard(point, offset, value, self.outside)

    def position(self, point: Point, offset: Point) -> Index:
        """Its number among the elements of the dimensions with windows."""
        return flat(self.source(point, offset), self.x.size[self.batch :])

    def start(self, point: Point) -> Expr:
        """The number of the window's first element."""
        total: Expr = const(0, DType.I64)
        sizes = self.x.size[self.batch :]
        for window, place, size in zip(self.windows, point[self.batch :], sizes, strict=True):
            length = IndexValue(DType.I64, size)
            total = _b.add(_b.mul(total, length), window.start(place))
        return total

    def combined(self, t: Builder, size: Sequence[Index], combine: Combine) -> Value:
        """All elements of each window in one: written out, or in a loop."""
        join = _b.add if combine is Combine.SUM else _b.max
        if self.count <= MOST_UNROLLED:
            every = list(offsets(self.windows))
            return Value(
                tuple(size),
                self.x.dtype,
                lambda point: reduce(join, (self.term(point, offset) for offset in every)),
            )
        inner = [Index.of(window.most) for window in self.windows]
        return t.reduce(combine, size, inner, self.term)


def _pool(t: Builder, result: Result, x: Value, windows: Sequence[Window], outside: Expr) -> Pool:
    """Windows over `x`, which is computed once if they overlap."""
    reads = [*result.size, *(Index.of(window.most) for window in windows)]
    return Pool(settled(t, x, reads), windows, outside)


def _spatial(size: Sequence[Index], count: int) -> Sequence[Index]:
    return size[len(size) - count :]


# --- the largest ---


def _lowest(kind: DType) -> Expr:
    if kind.is_float:
        return const(float("-inf"), kind)
    return const(-(1 << (8 * kind.bytes - 1)) if kind.is_signed else 0, kind)


def _largest(
    t: Builder, result: tuple[Result, Result], x: Value, windows: Sequence[Window] | None
) -> Pair | None:
    """The largest element of each window and its number; of several the first, of NaNs the last."""
    if windows is None or x.dtype is DType.BOOL:
        return None
    values, numbers = result
    pool = _pool(t, values, x, windows, _lowest(x.dtype.computed_in))
    rising = Rising.of if numbers.is_read else Rising.of_any
    top = _of_inner(t, values, pool, x, rising) or pool.combined(t, values.size, Combine.MAX)
    if pool.count > MOST_UNROLLED:
        return top, _found_number(t, pool, numbers, top)
    return top, Value(numbers.size, DType.I64, lambda point: _first_number(pool, point))


def _of_inner(
    t: Builder, result: Result, pool: Pool, x: Value, rising: Callable[[Expr], Rising | None]
) -> Value | None:
    """What is computed of numbers, one each, of the largest number of each window.

    max(f(x[i]), f(x[j]), …) = f(max(x[i], x[j], …)), f never falling; None where f may.
    """
    found = rising(probe(x))
    if found is None or not all(map(_is_never_empty, pool.windows)):
        return None
    # Half precision is kept as such, though it is computed in more.
    kind = x.dtype if x.dtype.computed_in is found.inner.dtype else found.inner.dtype

    def inner(point: Point) -> Expr:
        own = rising(x.load(point))
        assert own is not None, "it is the same function at every point"
        return own.inner

    whole = _pool(t, result, Value(x.size, kind, inner), pool.windows, _lowest(kind.computed_in))
    top = whole.combined(t, result.size, Combine.MAX)
    if pool.count > MOST_UNROLLED:  # the loop is there already
        return Value(result.size, result.dtype, lambda point: found.at(top.load(point)))
    floats = pool.combined(t, result.size, Combine.MAX)

    def load(point: Point) -> Expr:
        # Somebody may have had it put in memory since, as floats.
        is_computed = rising(probe(x)) is not None
        return found.at(top.load(point)) if is_computed else floats.load(point)

    return Value(result.size, result.dtype, load)


def _is_never_empty(window: Window) -> bool:
    """Whether no window lies outside of the dimension: the largest of nothing is -inf."""
    return not isinstance(window, Sliding) or (window.apart == 1 and window.before < window.size)


def _first_number(pool: Pool, point: Point) -> Expr:
    """Goes over the window once, with the largest so far."""
    best, number = pool.outside, pool.start(point)
    for offset in offsets(pool.windows):
        value = pool.term(point, offset)
        is_next = _b.gt(value, best)
        if value.dtype.is_float:
            is_next = _b.or_(is_next, _b.is_nan(value))
        place = IndexValue(DType.I64, pool.position(point, offset))
        number = _b.where(is_next, place, number)
        best = value if best is pool.outside else _b.max(best, value)
    return number


def _found_number(t: Builder, pool: Pool, numbers: Result, top: Value) -> Value:
    """The smallest number of an element that is the largest; NaNs count below, from the end."""

    def candidate(point: Point, offset: Point) -> Expr:
        value, most = (
            rounded(e, pool.x.dtype) for e in (pool.term(point, offset), top.load(point))
        )
        place = IndexValue(DType.I64, pool.position(point, offset))
        found = _b.where(_b.eq(value, most), place, FAR)
        if value.dtype.is_float:
            found = _b.where(_b.is_nan(value), _b.sub(const(-1, DType.I64), place), found)
        return pool.guard(point, offset, found, const(FAR, DType.I64))

    inner = [Index.of(window.most) for window in pool.windows]
    least = t.reduce(Combine.MIN, numbers.size, inner, candidate)

    def load(point: Point) -> Expr:
        number = least.load(point)
        return _b.where(_b.lt(number, 0), _b.sub(const(-1, DType.I64), number), number)

    return Value(numbers.size, DType.I64, load)


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(
    t: Builder, result: tuple[Result, Result], x: Value, size: Any, *how: Any
) -> Pair | None:
    """max of x over each window, and where it lies"""
    return _largest(t, result, x, _windows(x.size, result[0].size, 2, (size, *how)))


@lowers(aten.max_pool3d_with_indices.default)
def max_pool3d(
    t: Builder, result: tuple[Result, Result], x: Value, size: Any, *how: Any
) -> Pair | None:
    """max of x over each window, and where it lies"""
    return _largest(t, result, x, _windows(x.size, result[0].size, 3, (size, *how)))


def _windows(
    inner: Sequence[Index], outer: Sequence[Index], count: int, how: Sequence[Any]
) -> list[Sliding] | None:
    """Windows over the last `count` dimensions, from the arguments of max pooling."""
    arguments: list[Any] = [*how, *((), 0, 1)[len(how) - 1 :]]
    size, step, before, apart = arguments[:4]
    return sliding(_spatial(inner, count), _spatial(outer, count), size, step, before, apart)


@lowers(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(
    t: Builder, result: tuple[Result, Result], x: Value, size: Any
) -> Pair | None:
    """max of x over as many windows as were asked for, and where it lies"""
    return _largest(t, result, x, adaptive(_spatial(x.size, 2), _spatial(result[0].size, 2)))


@lowers(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(
    t: Builder, result: tuple[Result, Result], x: Value, size: Any
) -> Pair | None:
    """max of x over as many windows as were asked for, and where it lies"""
    return _largest(t, result, x, adaptive(_spatial(x.size, 3), _spatial(result[0].size, 3)))


# --- back from the largest ---


def _covering(
    windows: Sequence[Window],
    point: Point,
    value: Callable[[Point], Expr],
    *,
    exact: bool,
) -> list[Expr]:
    """`value` of each window that may cover a point; with `exact`, of those that do."""
    batch = len(point) - len(windows)
    terms = []
    for numbers in product(*(range(window.reach) for window in windows)):
        pairs = zip(windows, point[batch:], numbers, strict=True)
        found = [window.covering(index, number) for window, index, number in pairs]
        inside = value((*point[:batch], *(window.place for window in found)))
        bounds = [window.exists for window in found]
        if exact:
            bounds += [window.covers for window in found]
        terms.append(guarded(inside, list(dict.fromkeys(bounds)), const(0, inside.dtype)))
    return terms


def _returned(
    t: Builder, result: Result, grad: Value, numbers: Value, windows: Sequence[Window] | None
) -> Value | None:
    """Each gradient to the element that was the largest."""
    if windows is None:
        return None
    batch = len(result.size) - len(windows)
    kind = result.dtype.computed_in
    if prod(window.reach for window in windows) > MOST_GATHERED:
        return _scattered(t, result, grad, numbers, batch)
    size = result.size[batch:]

    def load(point: Point) -> Expr:
        own = IndexValue(DType.I64, flat(point[batch:], size))

        def value(place: Point) -> Expr:
            chosen = _b.eq(numbers.load(place), own)
            return _b.where(chosen, cast(grad.load(place), kind), 0)

        return added(_covering(windows, point, value, exact=False))

    return Value(result.size, result.dtype, load)


def _scattered(t: Builder, result: Result, grad: Value, numbers: Value, batch: int) -> Value:
    kind = result.dtype.computed_in
    size = result.size[batch:]
    count = reduce(lambda total, length: total * length, size, Index.of(1))

    def place(point: Point) -> Point:
        number = place_at(numbers.load(point), count, wraps=False)
        return (*point[:batch], *unflat(number, size))

    updates = Updates(grad.size, place, lambda p: cast(grad.load(p), kind), Combine.SUM)
    done = t.scatter(Value(result.size, kind, lambda _: const(0, kind)), updates)
    return Value(result.size, result.dtype, done.load)


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_backward(
    t: Builder, result: Result, grad: Value, x: Value, size: Any, *how: Any
) -> Value | None:
    """result[i] = sum of grad over the windows whose largest element is i"""
    *arguments, _, numbers = how
    windows = _windows(result.size, grad.size, 2, (size, *arguments))
    return _returned(t, result, grad, numbers, windows)


@lowers(aten.max_pool3d_with_indices_backward.default)
def max_pool3d_backward(
    t: Builder, result: Result, grad: Value, x: Value, size: Any, *how: Any
) -> Value | None:
    """result[i] = sum of grad over the windows whose largest element is i"""
    *arguments, _, numbers = how
    windows = _windows(result.size, grad.size, 3, (size, *arguments))
    return _returned(t, result, grad, numbers, windows)


@lowers(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool2d_backward(
    t: Builder, result: Result, grad: Value, x: Value, numbers: Value
) -> Value | None:
    """result[i] = sum of grad over the windows whose largest element is i"""
    windows = adaptive(_spatial(result.size, 2), _spatial(grad.size, 2))
    return _returned(t, result, grad, numbers, windows)


@lowers(aten.adaptive_max_pool3d_backward.default)
def adaptive_max_pool3d_backward(
    t: Builder, result: Result, grad: Value, x: Value, numbers: Value
) -> Value | None:
    """result[i] = sum of grad over the windows whose largest element is i"""
    windows = adaptive(_spatial(result.size, 3), _spatial(grad.size, 3))
    return _returned(t, result, grad, numbers, windows)


# --- the mean ---


@dataclass(frozen=True, slots=True)
class _Divisor:
    """What the sum of a window is divided by."""

    windows: Sequence[Window]
    pads_count: bool = False
    given: int | None = None

    def at(self, point: Point, kind: DType) -> Expr:
        """The number, for the window at a point."""
        if self.given is not None:
            return const(self.given, kind)
        places = point[len(point) - len(self.windows) :]
        widths = [
            window.padded_width(place)
            if self.pads_count and isinstance(window, Sliding)
            else window.width(place)
            for window, place in zip(self.windows, places, strict=True)
        ]
        return cast(reduce(_b.mul, widths), kind)


def _mean(t: Builder, result: Result, x: Value, divisor: _Divisor | None) -> Value | None:
    """Sum over each window, divided."""
    if divisor is None:
        return None
    kind = result.dtype.computed_in
    pool = _pool(t, result, x, divisor.windows, const(0, kind))
    total = pool.combined(t, result.size, Combine.SUM)
    return Value(
        result.size,
        result.dtype,
        lambda point: _b.div(total.load(point), divisor.at(point, kind)),
    )


def _mean_backward(
    t: Builder, result: Result, grad: Value, divisor: _Divisor | None
) -> Value | None:
    """Sum of the shares of all windows that cover an element."""
    if divisor is None:
        return None
    windows = divisor.windows
    if prod(window.reach for window in windows) > MOST_UNROLLED:
        return None
    kind = result.dtype.computed_in

    def share(place: Point) -> Expr:
        return _b.div(cast(grad.load(place), kind), divisor.at(place, kind))

    shares = Value(grad.size, kind, share)
    if prod(window.reach for window in windows) > 1:
        shares = t.keep(shares)  # a division for each window, not for each element it covers

    def load(point: Point) -> Expr:
        return added(_covering(windows, point, shares.load, exact=True))

    return Value(result.size, result.dtype, load)


def _divisor(
    inner: Sequence[Index], outer: Sequence[Index], count: int, how: Sequence[Any]
) -> _Divisor | None:
    """From the arguments of average pooling."""
    arguments: list[Any] = [*how, *((), 0, False, True, None)[len(how) - 1 :]]
    size, step, before, _, pads_count, given = arguments
    windows = sliding(_spatial(inner, count), _spatial(outer, count), size, step, before)
    return None if windows is None else _Divisor(windows, pads_count, given)


@lowers(aten.avg_pool2d.default)
def avg_pool2d(t: Builder, result: Result, x: Value, size: Any, *how: Any) -> Value | None:
    """sum of x over each window / number of its elements"""
    return _mean(t, result, x, _divisor(x.size, result.size, 2, (size, *how)))


@lowers(aten.avg_pool3d.default)
def avg_pool3d(t: Builder, result: Result, x: Value, size: Any, *how: Any) -> Value | None:
    """sum of x over each window / number of its elements"""
    return _mean(t, result, x, _divisor(x.size, result.size, 3, (size, *how)))


@lowers(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    t: Builder, result: Result, grad: Value, x: Value, *how: Any
) -> Value | None:
    """sum of grad / number of elements over the windows that cover an element"""
    return _mean_backward(t, result, grad, _divisor(result.size, grad.size, 2, how))


@lowers(aten.avg_pool3d_backward.default)
def avg_pool3d_backward(
    t: Builder, result: Result, grad: Value, x: Value, *how: Any
) -> Value | None:
    """sum of grad / number of elements over the windows that cover an element"""
    return _mean_backward(t, result, grad, _divisor(result.size, grad.size, 3, how))


def _adaptive_divisor(
    inner: Sequence[Index], outer: Sequence[Index], count: int
) -> _Divisor | None:
    windows = adaptive(_spatial(inner, count), _spatial(outer, count))
    return None if windows is None else _Divisor(windows)


@lowers(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(t: Builder, result: Result, x: Value, size: Any) -> Value | None:
    """sum of x over each window / number of its elements"""
    return _mean(t, result, x, _adaptive_divisor(x.size, result.size, 2))


@lowers(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(t: Builder, result: Result, x: Value, size: Any) -> Value | None:
    """sum of x over each window / number of its elements"""
    return _mean(t, result, x, _adaptive_divisor(x.size, result.size, 3))


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(t: Builder, result: Result, grad: Value, x: Value) -> Value | None:
    """sum of grad / number of elements over the windows that cover an element"""
    return _mean_backward(t, result, grad, _adaptive_divisor(result.size, grad.size, 2))


@lowers(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(t: Builder, result: Result, grad: Value, x: Value) -> Value | None:
    """sum of grad / number of elements over the windows that cover an element"""
    return _mean_backward(t, result, grad, _adaptive_divisor(result.size, grad.size, 3))
