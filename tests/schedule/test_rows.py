"""Rows: which axes of each loop count them, and why loops have no common ones."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from stator.loops.index import Axis, Index, Leaf, Symbol
from stator.lower.items import Compute
from stator.schedule.rows import (
    Rows,
    assign,
    coordinates,
    own_rows,
    position,
    row_number,
    why_other_row,
)
from tests.schedule.loops import added, along, mapped, reduced, result_of, row_sum, scanned, tensor

N: Final = Index.of(Symbol("n"))


def rows_of(*members: Compute) -> Rows:
    rows, reason = assign(members)
    assert rows is not None
    assert not reason
    return rows


def refusal(*members: Compute) -> str:
    rows, reason = assign(members)
    assert rows is None or reason
    return reason


# Numbers and places


def test_an_axis_of_one_position_stands_at_zero() -> None:
    assert position(Axis("i", Index.of(1))) is Index.of(0)
    assert position(Axis("i", N)) is Index.of(Axis("i", N))


def test_rows_are_counted_in_row_major_order() -> None:
    i, j = Axis("i", Index.of(3)), Axis("j", Index.of(5))

    assert row_number((i, j)) is 5 * Index.of(i) + Index.of(j)
    assert row_number(()) is Index.of(0)


STRIDES: Final = {
    "contiguous": ((3, 4, 5), (20, 5, 1)),
    "transposed": ((3, 4, 5), (1, 3, 12)),
    "channels last": ((2, 3, 4), (12, 1, 3)),
    "with ones": ((1, 4, 1, 5), (20, 5, 5, 1)),
    "with ones of odd strides": ((4, 1, 5), (5, 77, 1)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_coordinates_are_where_an_element_was_stored(name: str) -> None:
    size, stride = STRIDES[name]
    loop = mapped("x", size, tensor("y", *size).load, stride)

    for point in itertools.product(*(range(n) for n in size)):
        place = sum(i * step for i, step in zip(point, stride, strict=True))
        found = coordinates(Index.of(place), loop)
        assert found is not None
        assert [index.constant for index in found] == list(point)


def test_coordinates_of_an_axis_are_that_axis() -> None:
    loop = mapped("x", (N, 4), tensor("y", N, 4).load)

    found = coordinates(loop.store, loop)

    assert found == [Index.of(axis) for axis in loop.outer]


def test_elements_that_leave_gaps_have_no_coordinates() -> None:
    loop = mapped("x", (3, 4), tensor("y", 3, 4).load, (8, 2))

    assert coordinates(Index.of(8), loop) is None


# Rows of one loop


def test_a_reduction_s_rows_are_its_results() -> None:
    loop = row_sum("s", tensor("x", 3, 4, 5))

    assert along(own_rows(loop)) == ["o0", "o1"]


@pytest.mark.parametrize(("dim", "rows"), [(0, ["o1", "o2"]), (1, ["o0", "o2"]), (2, ["o0", "o1"])])
def test_a_scan_s_rows_are_all_axes_but_its_own(dim: int, rows: list[str]) -> None:
    loop = scanned("s", tensor("x", 3, 4, 5), dim)

    assert along(own_rows(loop)) == rows


def test_a_loop_alone_always_has_rows() -> None:
    for loop in (
        mapped("m", (3, 4), tensor("x", 3, 4).load),
        mapped("one", (), tensor("x").load),
        row_sum("s", tensor("x", 3, 4)),
    ):
        assert rows_of(loop)[loop.name] == loop.outer


# Rows of several


def softmax() -> list[Compute]:
    """exp(x) / sum(exp(x)), as three loops"""
    x = tensor("x", 6, 8)
    e = mapped("e", (6, 8), x.load)
    total = row_sum("total", result_of(e))
    ratio = mapped(
        "ratio", (6, 8), lambda p: added(result_of(e).load(p), result_of(total).load(p[:1]))
    )
    return [e, total, ratio]


def test_softmax_runs_in_the_rows_of_its_reduction() -> None:
    rows = rows_of(*softmax())

    assert [along(rows[name]) for name in ("e", "total", "ratio")] == [["o0"], ["o0"], ["o0"]]


def test_batch_norm_s_rows_are_its_channels() -> None:
    """Statistics over batch and places; the result follows along its second axis."""
    x = tensor("x", 4, 3, 7)
    mean = reduced("mean", (3,), (4, 7), lambda p, r: x.load((r[0], p[0], r[1])))
    out = mapped("out", (4, 3, 7), lambda p: added(x.load(p), result_of(mean).load((p[1],))))

    rows = rows_of(mean, out)

    assert along(rows["out"]) == ["o1"]


def test_group_norm_s_rows_are_two_axes() -> None:
    x = tensor("x", 4, 3, 7)
    mean = reduced("mean", (4, 3), (7,), lambda p, r: x.load((*p, *r)))
    out = mapped("out", (4, 3, 7), lambda p: added(x.load(p), result_of(mean).load(p[:2])))

    assert along(rows_of(mean, out)["out"]) == ["o0", "o1"]


def test_a_loop_that_is_read_follows_its_reader() -> None:
    """A column sum: the loop before it counts rows along its columns."""
    x = tensor("x", 4, 6)
    y = mapped("y", (4, 6), x.load)
    total = reduced("total", (6,), (4,), lambda p, r: result_of(y).load((r[0], p[0])))

    assert along(rows_of(y, total)["y"]) == ["o1"]


def test_what_follows_nobody_counts_rows_along_its_first_axes() -> None:
    total = row_sum("total", tensor("x", 6, 8))
    other = mapped("other", (6, 3), tensor("z", 6, 3).load)

    assert along(rows_of(total, other)["other"]) == ["o0"]


def test_symbolic_rows_are_found_as_well() -> None:
    x = tensor("x", N, 8)
    total = row_sum("total", x)
    out = mapped("out", (N, 8), lambda p: added(x.load(p), result_of(total).load(p[:1])))

    assert along(rows_of(total, out)["out"]) == ["o0"]


def test_pointwise_loops_over_the_same_points_share_all_of_them() -> None:
    first = mapped("first", (3, 4), tensor("x", 3, 4).load)
    second = mapped("second", (3, 4), result_of(first).load)

    assert rows_of(first, second) == {"first": first.outer, "second": second.outer}


# Refusals


def test_reductions_with_other_rows_are_refused() -> None:
    rows, columns = tensor("x", 4, 6), tensor("x", 4, 6)
    over_rows = row_sum("over_rows", rows)
    over_columns = reduced("over_columns", (6,), (4,), lambda p, r: columns.load((r[0], p[0])))

    assert "over_columns has other rows than over_rows: 4" in refusal(over_rows, over_columns)


def test_equal_numbers_of_rows_of_different_symbols_are_not_the_same() -> None:
    m = Index.of(Symbol("m"))
    first, second = row_sum("first", tensor("x", N, 4)), row_sum("second", tensor("y", m, 4))

    assert "has other rows" in refusal(first, second)


def test_a_loop_that_does_not_fall_into_the_rows_is_refused() -> None:
    total = row_sum("total", tensor("x", 6, 8))
    other = mapped("other", (4, 5), tensor("z", 4, 5).load)

    assert refusal(total, other) == "other does not fall into 6 rows"


def test_a_reader_of_another_row_is_refused() -> None:
    x = tensor("x", 6, 8)
    y = mapped("y", (6, 8), x.load)
    total = reduced("total", (6,), (8,), lambda p, r: result_of(y).load((Index.of(5) - p[0], r[0])))

    assert "total reads y in another row than it is written in" in refusal(y, total)


def test_a_transposed_reader_of_all_points_is_refused() -> None:
    first = mapped("first", (4, 4), tensor("x", 4, 4).load)
    second = mapped("second", (4, 4), lambda p: result_of(first).load((p[1], p[0])))

    assert "another row" in refusal(first, second)


def test_a_reader_of_a_total_over_all_rows_is_refused() -> None:
    x = tensor("x", 6, 8)
    total = reduced("total", (), (6, 8), lambda p, r: x.load(r))
    rows = reduced(
        "rows", (6,), (8,), lambda p, r: added(x.load((*p, *r)), result_of(total).load(()))
    )

    assert "rows has other rows than total: 1" in refusal(total, rows)


def test_rows_with_gaps_are_refused() -> None:
    x = tensor("x", 6, 8)
    spread = mapped("spread", (6, 8), x.load, (32, 2))
    total = row_sum("total", result_of(spread))

    assert "spread does not lie in rows" in refusal(spread, total)


def test_what_is_written_in_the_same_row_has_no_refusal() -> None:
    members = softmax()
    rows = {member.name: member.outer[:1] for member in members}

    assert why_other_row(members, rows) == ""


def test_every_load_of_softmax_stays_in_its_row() -> None:
    """By brute force: the row that wrote an element is the row that reads it."""
    members = softmax()
    rows = rows_of(*members)
    makers = {member.name: member for member in members}
    for reader in members:
        axes = (*reader.outer, *reader.inner)
        for values in itertools.product(*(range(axis.size.constant or 0) for axis in axes)):
            at: dict[Leaf, Index] = {a: Index.of(v) for a, v in zip(axes, values, strict=True)}
            row = row_number(rows[reader.name]).replaced(at)
            for load in reader.loads:
                if load.buffer.name in makers:
                    maker = makers[load.buffer.name]
                    point = coordinates(load.index.replaced(at), maker)
                    assert point is not None
                    assert point[0] is row
