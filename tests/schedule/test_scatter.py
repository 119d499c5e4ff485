"""Scatters: threads share axes that keep apart, so that no two of them touch one element."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import pytest

from stator.core.dtypes import DType
from stator.loops import interp
from stator.loops.build import apply
from stator.loops.index import Axis, Element, Index, Leaf, Symbol
from stator.loops.ir import Buffer, Combine, Expr, Kernel, Load, Store
from stator.loops.prims import Prim
from stator.loops.text import to_text
from stator.loops.verify import verify
from stator.lower.items import Scatter
from stator.schedule.scatter import BLOCK, scatter_kernel
from tests.fuzz.arguments import Array

WHERE: Final = Buffer("where", DType.I64, Index.of(600))
VALUES: Final = Buffer("values", DType.F32, Index.of(4096))


def axes(*sizes: int | Index) -> tuple[Axis, ...]:
    return tuple(Axis(f"u{d}", Index.of(n)) for d, n in enumerate(sizes))


def computed(index: Index) -> Index:
    """A place that the program looks up."""
    return Index.of(Element(Load(DType.I64, WHERE, index)))


def scatter(
    own: tuple[Axis, ...], place: Index, length: int, combine: Combine | None = Combine.SUM
) -> Scatter:
    """Values in row-major order go to `place`."""
    number = Index.of(0)
    for axis in own:
        number = number * axis.size + (axis if axis.size.constant != 1 else 0)
    value: Expr = Load(DType.F32, VALUES, number)
    return Scatter(Buffer("into", DType.F32, Index.of(length)), own, place, value, combine)


def index_add_rows(rows: int, width: int, into: int) -> Scatter:
    """into[where[i], j] += values[i, j]"""
    i, j = own = axes(rows, width)
    return scatter(own, computed(Index.of(i)) * width + j, into * width)


def scatter_add_columns(rows: int, width: int, into: int) -> Scatter:
    """into[where[i, j], j] += values[i, j]"""
    i, j = own = axes(rows, width)
    return scatter(own, computed(Index.of(i) * width + j) * width + j, into * width)


def scatter_add_rows(rows: int, width: int, into: int) -> Scatter:
    """into[i, where[i, j]] += values[i, j]; nobody knows that the place stays in its row"""
    i, j = own = axes(rows, width)
    return scatter(own, Index.of(i) * into + computed(Index.of(i) * width + j), rows * into)


def clamped_rows(rows: int, width: int, into: int) -> Scatter:
    """The same where the place is known to stay in its row."""
    i, j = own = axes(rows, width)
    inside = apply(Prim.MIN, Load(DType.I64, WHERE, Index.of(i) * width + j), into - 1)
    place = Index.of(Element(apply(Prim.MAX, inside, 0)))
    return scatter(own, Index.of(i) * into + place, rows * into)


def bincount(count: int, into: int) -> Scatter:
    """into[where[i]] += values[i]"""
    (i,) = own = axes(count)
    return scatter(own, computed(Index.of(i)), into)


def strided(rows: int, width: int) -> Scatter:
    """into[4*j + i]: both axes step by known amounts"""
    i, j = own = axes(rows, width)
    return scatter(own, Index.of(j) * 4 + i, 4 * width + rows)


def diagonal(rows: int, width: int) -> Scatter:
    """into[i + j]: both move one element, so they meet"""
    i, j = own = axes(rows, width)
    return scatter(own, Index.of(i) + j, rows + width)


def batched(batch: int, rows: int, width: int, into: int) -> Scatter:
    """into[b, where[i], j] += values[b, i, j]"""
    b, i, j = own = axes(batch, rows, width)
    row = computed(Index.of(i)) * width + j
    return scatter(own, Index.of(b) * (into * width) + row, batch * into * width)


# Which places are looked up stays below `into`, the last number of each.
CASES: Final[dict[str, tuple[Scatter, int]]] = {
    "index add": (index_add_rows(7, 5, 4), 4),
    "index add of long rows": (index_add_rows(3, 96, 4), 4),
    "index add of prime rows": (index_add_rows(3, 67, 4), 4),
    "index add of one column": (index_add_rows(9, 1, 4), 4),
    "scatter add along columns": (scatter_add_columns(4, 6, 5), 5),
    "scatter add along rows": (scatter_add_rows(4, 6, 5), 5),
    "clamped along rows": (clamped_rows(4, 6, 5), 5),
    "bincount": (bincount(40, 6), 6),
    "strided": (strided(4, 6), 1),
    "strided and wider": (strided(6, 6), 1),
    "diagonal": (diagonal(4, 6), 1),
    "batched": (batched(3, 5, 4, 6), 6),
    "batched long rows": (batched(2, 3, 64, 4), 4),
}


def where(limit: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, limit, 600)


def touched(kernel: Kernel, places: Array) -> dict[tuple[int, ...], set[int]]:
    """Elements of the buffer that each outer iteration combines into."""
    (stage,) = kernel.stages
    (store,) = stage.body
    assert isinstance(store, Store)
    found: dict[tuple[int, ...], set[int]] = {}
    for outer in points(kernel.outer):
        for inner in points(stage.inner):
            at = dict(zip((*kernel.outer, *stage.inner), (*outer, *inner), strict=True))
            found.setdefault(outer, set()).add(evaluated(store.index, at, places))
    return found


def points(of: tuple[Axis, ...]) -> Any:
    return itertools.product(*(range(axis.size.constant or 0) for axis in of))


def evaluated(index: Index, at: dict[Axis, int], places: Array) -> int:
    known: dict[Leaf, Index] = {axis: Index.of(value) for axis, value in at.items()}
    total = 0
    for product, factor in index.replaced(known).terms:
        for atom in product:
            assert isinstance(atom, Element)
            factor *= looked_up(atom.expr, places)
        total += factor
    return total


def looked_up(expr: Expr, places: Array) -> int:
    """The place that an expression is, clamped or not: all of them are in bounds."""
    load = next(part for part in _loads(expr) if part.buffer is WHERE)
    assert load.index.constant is not None
    return int(places[load.index.constant])


def _loads(expr: Expr) -> list[Load]:
    if isinstance(expr, Load):
        return [expr]
    return [load for operand in expr.operands for load in _loads(operand)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_no_two_threads_touch_one_element(name: str, seed: int) -> None:
    item, limit = CASES[name]

    shares = touched(scatter_kernel("k", item), where(limit, seed))

    for one, other in itertools.combinations(shares.values(), 2):
        assert one.isdisjoint(other), to_text(scatter_kernel("k", item))


@pytest.mark.parametrize("combine", [None, Combine.SUM, Combine.MAX, Combine.PROD])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_updates_one_after_the_other(
    name: str, combine: Combine | None
) -> None:
    item, limit = CASES[name]
    item = Scatter(item.buffer, item.axes, item.index, item.value, combine)
    places = where(limit, 7)
    values = np.random.default_rng(1).integers(1, 3, 4096).astype(np.float32)
    length = item.buffer.size.constant or 0
    actual, expected = np.ones(length, np.float32), np.ones(length, np.float32)
    for number, at in enumerate(points(item.axes)):
        place = evaluated(item.index, dict(zip(item.axes, at, strict=True)), places)
        expected[place] = combined(combine, expected[place], values[number])

    kernel = scatter_kernel("k", item)
    verify(kernel)
    interp.run(kernel, {"into": actual, "where": places, "values": values}, {})

    np.testing.assert_array_equal(actual, expected)


def combined(combine: Combine | None, before: Any, value: Any) -> Any:
    match combine:
        case Combine.SUM:
            return before + value
        case Combine.PROD:
            return before * value
        case Combine.MAX:
            return max(before, value)
        case _:
            return value


# Which axes are shared


def outer(item: Scatter) -> list[str]:
    return [axis.name for axis in scatter_kernel("k", item).outer]


def test_elements_of_a_row_are_shared_in_blocks() -> None:
    kernel = scatter_kernel("k", index_add_rows(3, 512, 4))

    (across,) = kernel.outer
    (stage,) = kernel.stages
    assert across.size.constant == 2
    assert [axis.size.constant for axis in stage.inner] == [3, BLOCK]
    assert stage.in_order


def test_a_short_row_stays_with_one_thread() -> None:
    kernel = scatter_kernel("k", index_add_rows(7, 5, 4))

    assert kernel.outer == ()
    assert [axis.name for axis in kernel.stages[0].inner] == ["u0", "u1"]


def test_batches_are_shared_and_what_is_looked_up_is_not() -> None:
    item = batched(3, 5, 4, 6)

    kernel = scatter_kernel("k", item)

    # A row that is looked up may be another batch's, as far as the place tells.
    assert item.axes[1] not in kernel.outer
    assert item.axes[1] in kernel.stages[0].inner


def test_what_is_looked_up_runs_in_order() -> None:
    assert outer(bincount(40, 6)) == []
    assert scatter_kernel("k", bincount(40, 6)).stages[0].in_order


def test_axes_that_may_meet_are_not_shared() -> None:
    assert outer(diagonal(4, 6)) == []
    assert outer(strided(6, 6)) == []


def test_rows_are_shared_where_the_place_is_known_to_stay_inside() -> None:
    assert outer(scatter_add_rows(4, 6, 5)) == []
    kernel = scatter_kernel("k", clamped_rows(40, 6, 5))
    assert set(kernel.outer) <= {clamped_rows(40, 6, 5).axes[0]}


def test_axes_of_unknown_length_are_not_shared() -> None:
    i, j = own = axes(Index.of(Symbol("n")), Index.of(Symbol("m")))
    place = computed(Index.of(i)) * Symbol("m") + j

    assert outer(scatter(own, place, 10)) == []


def test_no_axes_are_one_update() -> None:
    kernel = scatter_kernel("k", scatter((), computed(Index.of(0)), 5))

    assert kernel.outer == ()
    assert kernel.stages[0].inner == ()
