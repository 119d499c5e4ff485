"""Windows over dimensions: which elements they cover, and which windows cover an element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Final, Protocol, TypeAlias

from stator.core.dtypes import DType
from stator.loops.build import Body, const
from stator.loops.index import Index, is_at_least, lower_bound, upper_bound
from stator.loops.ir import Expr, IndexValue, within
from stator.loops.values import Point
from stator.ops.arguments import per_dim

MOST_UNROLLED: Final = 64  # terms that are written out; more become a loop

Bound: TypeAlias = tuple[Index, Index]  # an index, and the limit that it has to stay below

_b = Body()


@dataclass(frozen=True, slots=True)
class Covering:
    """A window that may cover an element."""

    place: Index
    exists: Bound  # what must hold for there to be such a window
    covers: Bound  # and for it to cover the element


class Window(Protocol):
    """Windows along one dimension; `place` counts them, `offset` the elements of one."""

    @property
    def most(self) -> int:
        """Elements of the largest one."""
        ...

    @property
    def reach(self) -> int:
        """Windows that may cover one element, at most."""
        ...

    def source(self, place: Index, offset: Index) -> Index:
        """The element at an offset."""
        ...

    def holds(self, place: Index, offset: Index) -> Bound:
        """What must hold for there to be such an element."""
        ...

    def start(self, place: Index) -> Expr:
        """The first element that there is."""
        ...

    def width(self, place: Index) -> Expr:
        """How many elements there are."""
        ...

    def covering(self, element: Index, number: int) -> Covering:
        """One of the windows that may cover an element."""
        ...


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of one size, a step from each other, that may begin before the first element."""

    length: Index
    count: Index
    size: int
    step: int
    before: int = 0
    apart: int = 1  # from one element of a window to its next

    @property
    def most(self) -> int:
        """Elements of one."""
        return self.size

    @property
    def reach(self) -> int:
        """Windows that may cover one element."""
        return -(-((self.size - 1) * self.apart + 1) // self.step)

    def source(self, place: Index, offset: Index) -> Index:
        """The element at an offset; outside of the dimension there is none."""
        return place * self.step - self.before + offset * self.apart

    def holds(self, place: Index, offset: Index) -> Bound:
        """The element lies in the dimension."""
        return self.source(place, offset), self.length

    def start(self, place: Index) -> Expr:
        """The first element that lies in the dimension."""
        first = place * self.step - self.before
        later = IndexValue(DType.I64, first % self.apart)
        return within(first, self.length, IndexValue(DType.I64, first), later)

    def width(self, place: Index) -> Expr:
        """min(first + size, length) - max(first, 0)"""
        first = place * self.step - self.before
        return _b.sub(smaller(first + self.size, self.length), larger(first, Index.of(0)))

    def padded_width(self, place: Index) -> Expr:
        """The same, elements before and behind counted: min(size, length + before - first)"""
        return smaller(Index.of(self.size), self.length + 2 * self.before - place * self.step)

    def covering(self, element: Index, number: int) -> Covering:
        """The windows up to the last one that begins at or before the element."""
        ahead, back = element + self.before, self.reach - 1 - number
        place = ahead // self.step - back
        offset = ahead % self.step + back * self.step
        span = Index.of((self.size - 1) * self.apart + 1)
        return Covering(place, (place, self.count), (offset, span))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """As many windows as were asked for: from floor(i * n / m) to ceil((i + 1) * n / m)."""

    length: int
    count: int

    @property
    def most(self) -> int:
        """Elements of the largest one."""
        places = (Index.of(place) for place in range(self.count))
        return max(_whole(self._end(p)) - _whole(self._first(p)) for p in places)

    @property
    def reach(self) -> int:
        """Windows that may cover one element."""
        return Adaptive(self.count, self.length).most

    def _first(self, place: Index) -> Index:
        return place * self.length // self.count

    def _end(self, place: Index) -> Index:
        return ((place + 1) * self.length + (self.count - 1)) // self.count

    def source(self, place: Index, offset: Index) -> Index:
        """first + offset"""
        return self._first(place) + offset

    def holds(self, place: Index, offset: Index) -> Bound:
        """offset < end - first"""
        return offset, self._end(place) - self._first(place)

    def start(self, place: Index) -> Expr:
        """first"""
        return IndexValue(DType.I64, self._first(place))

    def width(self, place: Index) -> Expr:
        """end - first"""
        return IndexValue(DType.I32, self._end(place) - self._first(place))

    def covering(self, element: Index, number: int) -> Covering:
        """Windows cover elements as elements would cover windows."""
        turned = Adaptive(self.count, self.length)
        offset = Index.of(number)
        bound = turned.holds(element, offset)
        return Covering(turned.source(element, offset), bound, bound)


def sliding(lengths: Sequence[Index], counts: Sequence[Index], *how: Any) -> list[Sliding] | None:
    """Windows of sizes, steps, paddings and distances as operators give them."""
    rank = len(lengths)
    sizes = per_dim(how[0], rank)
    if sizes is None:
        return None
    steps = per_dim(how[1], rank) if how[1] else sizes
    before = per_dim(how[2], rank)
    apart = per_dim(how[3], rank) if len(how) > 3 else [1] * rank
    if steps is None or before is None or apart is None:
        return None
    numbers = zip(lengths, counts, sizes, steps, before, apart, strict=True)
    return [Sliding(*numbers_of_one) for numbers_of_one in numbers]


def adaptive(lengths: Sequence[Index], counts: Sequence[Index]) -> list[Adaptive] | None:
    """Windows for sizes that are known; None where one is not."""
    pairs = [(n.constant, m.constant) for n, m in zip(lengths, counts, strict=True)]
    known = [(n, m) for n, m in pairs if n and m]
    return [Adaptive(n, m) for n, m in known] if len(known) == len(pairs) else None


# --- several dimensions ---


def offsets(windows: Sequence[Window]) -> Iterator[Point]:
    """All offsets, in row-major order."""
    for numbers in product(*(range(window.most) for window in windows)):
        yield tuple(Index.of(n) for n in numbers)


def guarded(value: Expr, bounds: Sequence[Bound], outside: Expr) -> Expr:
    """`value` where every bound holds, else `outside`."""
    for index, limit in bounds:
        value = within(index, limit, value, outside)
    return value


def added(terms: Sequence[Expr]) -> Expr:
    """The sum, from the first to the last."""
    return reduce(_b.add, terms)


# --- numbers that indices bound ---


def _whole(index: Index) -> int:
    number = index.constant
    assert number is not None, "sizes of adaptive windows are known"
    return number


def _number(index: Index) -> Expr:
    whole = index.constant
    return IndexValue(DType.I32, index) if whole is None else const(whole, DType.I32)


def smaller(x: Index, y: Index) -> Expr:
    """min(x, y), which bounds may settle"""
    low, high = lower_bound(y - x), upper_bound(y - x)
    if low is not None and is_at_least(low, 0):
        return _number(x)
    if high is not None and is_at_least(-high, 0):
        return _number(y)
    return _b.min(_number(x), _number(y))


def larger(x: Index, y: Index) -> Expr:
    """max(x, y), which bounds may settle"""
    low, high = lower_bound(x - y), upper_bound(x - y)
    if low is not None and is_at_least(low, 0):
        return _number(x)
    if high is not None and is_at_least(-high, 0):
        return _number(y)
    return _b.max(_number(x), _number(y))
