"""Arguments of operators, as rules need them: dimensions, sizes, numbers, cheap sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from stator.core.dtypes import DType
from stator.loops.build import const
from stator.loops.index import Axis, Index
from stator.loops.ir import Expr, IndexValue, Load, loads_of
from stator.loops.values import Builder, Point, Value, product

CHEAP_TO_REPEAT: Final = 3  # operations and loads of a value that is rather computed again


def as_index(value: Any) -> Index | None:
    """A number or a size as an index; None for anything else."""
    if isinstance(value, bool):
        return None
    return Index.of(value) if isinstance(value, int | Index) else None


def per_dim(value: Any, count: int, default: int | None = None) -> list[int] | None:
    """One number for each of `count` dimensions; None where they are not plain numbers."""
    given = [value] if isinstance(value, int) else list(value)
    if not given and default is not None:
        given = [default]
    numbers = given * count if len(given) == 1 else given
    plain = all(isinstance(n, int) for n in numbers) and len(numbers) == count
    return numbers if plain else None


def dim_of(dim: int, x: Value) -> int:
    """A dimension counted from the front; a number alone has dimension 0."""
    return dim % max(x.rank, 1)


def scalar(value: Any, kind: DType) -> Expr | None:
    """A number as an expression; None where the type has no place for it."""
    if isinstance(value, Index):
        return IndexValue(kind, value)
    try:
        return const(value, kind) if isinstance(value, int | float) else None
    except (OverflowError, ValueError):  # infinity or NaN as an integer
        return None


def replaced(point: Point, dim: int, index: Index) -> Point:
    """The point with another coordinate in `dim`."""
    return (*point[:dim], index, *point[dim + 1 :])


def load_inside(x: Value, point: Point, dim: int, place: Index) -> Expr:
    """`x` at `place` along `dim`, for a choice that only reads it where it has such a place.

    Seen as an axis of x, the place simplifies further than the sum that it is.
    """
    inside = Axis(f"<{place}>", x.size[dim])
    return x.load(replaced(point, dim, Index.of(inside))).replaced({inside: place})


def probe_axes(x: Value) -> tuple[Axis, ...]:
    """Axes that walk over `x`, to look at how it is read."""
    return tuple(Axis(f"probe{d}", n) for d, n in enumerate(x.size))


def probe(x: Value) -> Expr:
    """How an element of `x` is read, at any place."""
    return x.load(tuple(Index.of(axis) for axis in probe_axes(x)))


def is_row_major(x: Value) -> bool:
    """Whether all that `x` reads lies so that its last dimension is the closest one.

    Where it does not, some operators lay their results as fake tensors do not foretell.
    """
    axes = [axis for axis in probe_axes(x) if axis.size.constant != 1]
    for load in loads_of(probe(x)):
        steps = [load.index.factor_of(axis) for axis in axes]
        whole = [step.constant for step in steps if step is not None and step.terms]
        known = [step for step in whole if step is not None]
        if known != sorted(known, reverse=True):
            return False
    return True


def settled(t: Builder, x: Value, reads: Sequence[Index]) -> Value:
    """`x`, in memory if `reads` points together would compute much of it again and again."""
    wanted, there = product(reads).constant, product(x.size).constant
    if wanted is not None and there is not None and wanted <= there:
        return x
    expr = probe(x)
    if isinstance(expr, Load) or expr.size <= CHEAP_TO_REPEAT:
        return x
    return t.keep(x)
