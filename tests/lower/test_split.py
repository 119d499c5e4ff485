"""Reductions in pieces: every element once, and what fills up changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from stator.core.dtypes import DType
from stator.loops.build import const
from stator.loops.index import Axis, Index, Leaf, Symbol
from stator.loops.interp import NUMPY, combined
from stator.loops.ir import Combine, Const, Expr, IndexValue, Within
from stator.loops.values import Point, flat
from stator.lower import split
from stator.lower.split import (
    ENOUGH_PROGRAMS,
    FEWEST_PIECES,
    MOST_PIECES,
    MOST_PROGRAMS,
    Pieces,
    in_pieces,
    in_pieces_on_a_gpu,
    neutral,
)
from tests.lower.graphs import lowered

ENOUGH: Final = split.WORTH_IT
COMPUTED: Final = [dtype for dtype in DType if dtype.computed_in is dtype]
NUMBERS: Final = (Combine.SUM, Combine.PROD, Combine.MAX, Combine.MIN)


def sizes(*numbers: int) -> list[Index]:
    return [Index.of(n) for n in numbers]


def cut(size: Sequence[int], inner: Sequence[int], combine: Combine = Combine.SUM) -> Pieces | None:
    """A reduction whose value at a point is the point's number."""

    def body(kept: Point, place: Point) -> Expr:
        return IndexValue(DType.I64, flat(place, sizes(*inner)))

    return in_pieces(combine, sizes(*size), sizes(*inner), body)


# When


@pytest.mark.parametrize("size", [(), (1,), (8,), (2, 4)])
def test_few_results_of_many_elements_are_cut(size: tuple[int, ...]) -> None:
    assert cut(size, (ENOUGH,)) is not None


def test_more_results_than_threads_need_are_not_cut() -> None:
    assert cut((9,), (ENOUGH,)) is None


def test_fewer_elements_than_it_is_worth_are_not_cut() -> None:
    assert cut((), (ENOUGH - 1,)) is None


def test_what_counts_is_the_product_of_the_inner_sizes() -> None:
    assert cut((), (256, ENOUGH // 256)) is not None
    assert cut((), (256, ENOUGH // 256 - 1)) is None


def test_an_unknown_number_of_elements_or_results_is_not_cut() -> None:
    n, many = Index.of(Symbol("n")), Index.of(ENOUGH)

    def body(kept: Point, place: Point) -> Expr:
        return Const(DType.F32, 1.0)

    assert in_pieces(Combine.SUM, [], [n, many], body) is None
    assert in_pieces(Combine.SUM, [n], [many], body) is None


# How


@pytest.mark.parametrize("elements", [1 << 16, 1 << 20, 1000 * 1000, 251 * 1009, 97 * 1013])
def test_a_number_with_a_divisor_is_cut_into_equal_pieces_without_a_guard(elements: int) -> None:
    pieces = cut((), (elements,))

    assert pieces is not None
    assert FEWEST_PIECES <= pieces.count < MOST_PIECES
    assert pieces.count * pieces.length == elements
    assert isinstance(at(pieces, 1, 2), IndexValue)


@pytest.mark.parametrize("elements", [65537, 257 * 263, 2 * 65537, 1000003])
def test_a_number_without_one_is_rounded_up_and_guarded(elements: int) -> None:
    pieces = cut((), (elements,))

    assert pieces is not None
    assert pieces.count == FEWEST_PIECES
    assert elements <= pieces.count * pieces.length < elements + FEWEST_PIECES
    assert isinstance(in_the_last_piece(pieces), Within)


def in_the_last_piece(pieces: Pieces) -> Expr:
    """The value at a place that may lie behind the end."""
    place = Axis("place", Index.of(pieces.length))
    return pieces.body((), Index.of(pieces.count - 1), Index.of(place))


def at(pieces: Pieces, number: int, place: int) -> Expr:
    return pieces.body((), Index.of(number), Index.of(place))


@pytest.mark.parametrize("inner", [(64,), (96,), (67,), (7, 13), (3, 5, 7), (2, 101)], ids=str)
def test_every_element_is_visited_once(
    inner: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "WORTH_IT", 1)
    pieces = cut((), inner)
    assert pieces is not None

    found: Counter[Any] = Counter()
    for number in range(pieces.count):
        for place in range(pieces.length):
            value = at(pieces, number, place)
            filled = isinstance(value, Const)
            found[None if filled else value.index.constant] += 1  # type: ignore[attr-defined]  # an IndexValue

    elements = int(np.prod(inner))
    assert found.pop(None, 0) == pieces.count * pieces.length - elements
    assert found == Counter(range(elements))


def test_the_kept_point_reaches_the_body() -> None:
    kept = Axis("kept", Index.of(3))
    seen: list[Point] = []

    def body(point: Point, place: Point) -> Expr:
        seen.append(point)
        return Const(DType.F32, 1.0)

    pieces = in_pieces(Combine.MAX, sizes(3), sizes(ENOUGH), body)
    assert pieces is not None
    pieces.body((Index.of(kept),), Index.of(0), Index.of(0))

    assert seen == [(Index.of(kept),)]


def test_a_guarded_piece_reads_nothing_behind_the_end() -> None:
    """The guard stands around the load: it is the value outside that has no load."""
    elements = 65537
    pieces = cut((), (elements,), Combine.MIN)
    assert pieces is not None

    choice = in_the_last_piece(pieces)

    assert isinstance(choice, Within)
    assert choice.limit is Index.of(elements)
    assert choice.outside is neutral(Combine.MIN, DType.I64)
    last: dict[Leaf, Index] = {axis: axis.size - 1 for axis in choice.axes}
    assert choice.replaced(last) is choice.outside


# Neutral values


def samples(dtype: DType) -> list[Any]:
    """Extremes, zeros and ordinary numbers of a type."""
    kind = NUMPY[dtype]
    if dtype is DType.BOOL:
        return [kind(False), kind(True)]
    if dtype.is_float:
        limits = np.finfo(kind)
        plain = [0.0, -1.5, 3.0, np.inf, -np.inf, np.nan]
        return [kind(v) for v in (*plain, limits.max, limits.min, limits.tiny)]
    whole = np.iinfo(kind)
    return [kind(v) for v in (0, 1, 5, whole.min, whole.max)]


def known_as(expr: Expr) -> Any:
    assert isinstance(expr, Const)
    return NUMPY[expr.dtype](expr.value)


@pytest.mark.parametrize("dtype", [d for d in COMPUTED if d is not DType.BOOL], ids=repr)
@pytest.mark.parametrize("combine", NUMBERS)
def test_a_neutral_number_changes_nothing(combine: Combine, dtype: DType) -> None:
    start = known_as(neutral(combine, dtype))

    for value in samples(dtype):
        for values in ([start, value], [value, start]):
            total = combined(combine, values, dtype)
            assert total == value or (total != total and value != value), (start, value, total)


@pytest.mark.parametrize("combine", [Combine.ANY, Combine.ALL, Combine.MAX, Combine.MIN])
def test_a_neutral_truth_changes_nothing(combine: Combine) -> None:
    start = known_as(neutral(combine, DType.BOOL))

    for value in samples(DType.BOOL):
        assert combined(combine, [start, value], DType.BOOL) == value


@pytest.mark.parametrize("dtype", COMPUTED, ids=repr)
def test_a_neutral_value_has_the_type_of_what_it_stands_for(dtype: DType) -> None:
    assert all(neutral(combine, dtype).dtype is dtype for combine in NUMBERS)


# In a program


def test_a_long_sum_becomes_two_loops_and_a_short_one() -> None:
    long = lowered(lambda x: x.sum(), torch.empty(1 << 17))
    short = lowered(lambda x: x.sum(), torch.empty(1 << 10))

    assert len(long.items) == len(short.items) + 1


def test_on_a_gpu_a_very_long_sum_has_many_pieces_and_a_long_one_enough() -> None:
    def pieces(elements: int) -> int:
        size, body = Index.of(elements), lambda _, place: const(1, DType.F32)
        found = in_pieces_on_a_gpu(Combine.SUM, [], [size], body, across=False)
        assert found is not None
        return found.count

    assert pieces(1 << 28) == MOST_PROGRAMS
    assert pieces(1 << 24) == ENOUGH_PROGRAMS
