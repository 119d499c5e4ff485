"""Tensors as functions from an index to an expression: what operators take and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stator.core.dtypes import DType
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr

Point: TypeAlias = tuple[Index, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor that may not exist yet: `load(point)` computes or reads one element."""

    size: tuple[Index, ...]
    dtype: DType
    load: Callable[[Point], Expr]

    @property
    def rank(self) -> int:
        """How many dimensions it has."""
        return len(self.size)


@dataclass(frozen=True, slots=True)
class Result:
    """What an operator has to return."""

    size: tuple[Index, ...]
    dtype: DType
    device: str = "cpu"  # kind of device that it lies on, by torch's name
    is_read: bool = True  # whether anybody reads it, if it is one of several


@dataclass(frozen=True, slots=True, eq=False)
class Updates:
    """Values that go to computed places: for each point of `size`, in row-major order."""

    size: tuple[Index, ...]
    place: Callable[[Point], Point]  # of the tensor that takes them; must be in bounds
    value: Callable[[Point], Expr]  # in the type that the tensor's elements are computed in
    combine: Combine | None = None  # None: the last one stays


class Builder(Protocol):
    """What operators are written with."""

    def reduce(
        self,
        combine: Combine,
        size: Sequence[Index],
        inner: Sequence[Index],
        body: Callable[[Point, Point], Expr],
    ) -> Value:
        """A reduction over `inner` for each point of `size`, in the type of its body."""
        ...

    def keep(self, value: Value) -> Value:
        """`value`, computed once for all that read it."""
        ...

    def scan(self, combine: Combine, value: Value, dim: int) -> Value:
        """What was combined up to each position of `dim`, that one included."""
        ...

    def scatter(self, into: Value, updates: Updates) -> Value:
        """A copy of `into` that took in `updates`, one after the other."""
        ...

    def require(self, holds: Value, error: type[Exception], message: str) -> None:
        """Raise `error` at run time unless every element of the bool `holds` is true."""
        ...

    def handed(self, number: int) -> Index:
        """A number that kernels are handed: those that differ in it alone are one."""
        ...


def broadcast(value: Value, size: Sequence[Index]) -> Value:
    """`value` seen in a larger size, as torch broadcasts."""
    missing = len(size) - value.rank

    def load(point: Point) -> Expr:
        own = point[missing:]
        return value.load(
            tuple(
                Index.of(0) if n.constant == 1 else i for i, n in zip(own, value.size, strict=True)
            )
        )

    return Value(tuple(size), value.dtype, load)


def product(sizes: Sequence[Index]) -> Index:
    """How many points there are."""
    total = Index.of(1)
    for size in sizes:
        total = total * size
    return total


def flat(point: Sequence[Index], size: Sequence[Index]) -> Index:
    """The number of an element in row-major order."""
    total = Index.of(0)
    for index, length in zip(point, size, strict=True):
        total = total * length + index
    return total


def unflat(number: Index, size: Sequence[Index]) -> Point:
    """The point with that number in row-major order."""
    point: list[Index] = []
    for position, length in enumerate(reversed(size)):
        outermost = position == len(size) - 1
        if length.constant == 1:
            point.append(Index.of(0))
            continue
        point.append(number if outermost else number % length)
        number = number // length
    return tuple(reversed(point))
