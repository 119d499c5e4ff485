"""Padding: constants, mirrored and repeated borders, and their backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import ZERO, Element, Index, is_at_least
from stator.loops.ir import Expr, IndexValue, within
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import as_index, scalar
from stator.ops.table import Exact, lowers
from stator.ops.window import MOST_UNROLLED, added

aten = torch.ops.aten
_b = Body()


def borders(pad: Any, rank: int) -> list[tuple[Index, Index]] | None:
    """Elements added before and behind each dimension; `pad` counts from the last one."""
    given = [as_index(n) for n in pad]
    known = [n for n in given if n is not None]
    if len(known) != len(given):
        return None
    pairs = list(zip(known[::2], known[1::2], strict=True))
    none = (Index.of(0), Index.of(0))
    return [none] * (rank - len(pairs)) + pairs[::-1]


@lowers(aten.constant_pad_nd.default, exact=Exact.EVERYWHERE)
def constant_pad(t: Builder, result: Result, x: Value, pad: Any, value: Any = 0) -> Value | None:
    """result[i] = x[i - before] where there is one, else value"""
    around = borders(pad, x.rank)
    kind = result.dtype.computed_in
    number = scalar(value, kind)
    if around is None or number is None:
        return None
    outside = number

    def load(point: Point) -> Expr:
        source = tuple(i - before for i, (before, _) in zip(point, around, strict=True))
        inside = x.load(source)
        for place, length, (before, behind) in zip(source, x.size, around, strict=True):
            if not (is_at_least(-before, 0) and is_at_least(-behind, 0)):
                inside = within(place, length, inside, outside)
        return inside

    return Value(result.size, result.dtype, load)


# --- mirrored and repeated borders ---

# Of a dimension: its length, and a place that may lie outside of it.  Gives the place inside.
Fold: TypeAlias = Callable[[Expr, Expr], Expr]
# Place of the padded tensor, and the range (index, limit) in which it counts.
Term: TypeAlias = tuple[Index, Index, Index]


def _mirror(place: Expr, last: Expr) -> Expr:
    """Away from both ends again: last - |last - |place||"""
    return _b.sub(last, _b.abs(_b.sub(last, _b.abs(place))))


def _nearest(place: Expr, last: Expr) -> Expr:
    """max(min(place, last), 0)"""
    return _b.max(_b.min(place, last), 0)


def _bordered(result: Result, x: Value, padding: Any, fold: Fold) -> Value | None:
    around = borders(padding, x.rank)
    if around is None:
        return None

    def folded(index: Index, length: Index, before: Index, behind: Index) -> Index:
        if not (before.terms or behind.terms):
            return index
        place = IndexValue(DType.I64, index - before)
        return Index.of(Element(fold(place, IndexValue(DType.I64, length - 1))))

    def load(point: Point) -> Expr:
        return x.load(
            tuple(folded(i, n, *ends) for i, n, ends in zip(point, x.size, around, strict=True))
        )

    return Value(result.size, x.dtype, load)


@lowers(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    exact=Exact.EVERYWHERE,
)
def reflection_pad(t: Builder, result: Result, x: Value, padding: Any) -> Value | None:
    """result[i] = x[n - 1 - |n - 1 - |i - before||]"""
    return _bordered(result, x, padding, _mirror)


@lowers(
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    exact=Exact.EVERYWHERE,
)
def replication_pad(t: Builder, result: Result, x: Value, padding: Any) -> Value | None:
    """result[i] = x[max(min(i - before, n - 1), 0)]"""
    return _bordered(result, x, padding, _nearest)


def _mirrored_from(index: Index, length: Index, before: int, behind: int) -> list[Term]:
    """Where an element went: to its own place, and to the two mirrored ones."""
    last = length - 1
    terms = [(index + before, Index.of(0), Index.of(1))]
    if before:
        terms.append((before - index, index - 1, Index.of(before)))
    if behind:
        terms.append((last * 2 - index + before, last - 1 - index, Index.of(behind)))
    return terms


def _repeated_from(index: Index, length: Index, before: int, behind: int) -> list[Term]:
    """Where an element went: to its own place; the first and last ones to the border, too."""
    terms = [(Index.of(place), index, Index.of(1)) for place in range(before)]
    terms.append((index + before, Index.of(0), Index.of(1)))
    past = length + before
    terms += [(past + place, index - (length - 1), Index.of(1)) for place in range(behind)]
    return terms


def _gathered(
    result: Result, grad: Value, padding: Any, from_: Callable[..., list[Term]]
) -> Value | None:
    around = [(a.constant, b.constant) for a, b in borders(padding, grad.rank) or []]
    known = [(a, b) for a, b in around if a is not None and b is not None and min(a, b) >= 0]
    if (
        len(known) != grad.rank
        or prod(len(from_(ZERO, ZERO, *ends)) for ends in known) > MOST_UNROLLED
    ):
        return None
    kind = result.dtype.computed_in

    def load(point: Point) -> Expr:
        choices = [
            from_(index, length, before, behind)
            for index, length, (before, behind) in zip(point, result.size, known, strict=True)
        ]
        return added([_term(grad, terms, kind) for terms in product(*choices)])

    return Value(result.size, result.dtype, load)


def _term(grad: Value, terms: Sequence[Term], kind: DType) -> Expr:
    value = cast(grad.load(tuple(place for place, _, _ in terms)), kind)
    for _, index, limit in terms:
        value = within(index, limit, value, const(0, kind))
    return value


@lowers(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)
def reflection_pad_backward(
    t: Builder, result: Result, grad: Value, x: Value, padding: Any
) -> Value | None:
    """result[i] = sum of grad at all places that read x[i]"""
    return _gathered(result, grad, padding, _mirrored_from)


@lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(
    t: Builder, result: Result, grad: Value, x: Value, padding: Any
) -> Value | None:
    """result[i] = sum of grad at all places that read x[i]"""
    return _gathered(result, grad, padding, _repeated_from)
