"""Index algebra: an index means the same before and after simplification."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stator.loops.index import (
    ZERO,
    Atom,
    Axis,
    Clamped,
    Index,
    Quotient,
    Remainder,
    Symbol,
    clamped,
    is_at_least,
    lower_bound,
    upper_bound,
)

S0, S1 = Symbol("s0"), Symbol("s1")
AXES: Final = (
    Axis("i0", Index.of(4)),
    Axis("i1", Index.of(7)),
    Axis("i2", Index.of(S0)),
    Axis("i3", 2 * Index.of(S1)),
    Axis("i4", Index.of(S0) + 1),
    Axis("i5", Index.of(1)),
)
I0, I1, I2, I3, I4, I5 = (Index.of(axis) for axis in AXES)

Values: TypeAlias = dict[Atom, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same number twice: as an index, and as Python computes it."""

    index: Index
    number: Callable[[Values], int]


def evaluate(index: Index, values: Values) -> int:
    """The number that an index is, given those of its axes and symbols."""
    total = 0
    for product, factor in index.terms:
        for atom in product:
            match atom:
                case Quotient():
                    factor *= evaluate(atom.value, values) // evaluate(atom.by, values)
                case Remainder():
                    factor *= evaluate(atom.value, values) % evaluate(atom.by, values)
                case Clamped():
                    most = min(evaluate(atom.value, values), evaluate(atom.high, values))
                    factor *= max(evaluate(atom.low, values), most)
                case _:
                    factor *= values[atom]
        total += factor
    return total


def leaf(atom: Axis | Symbol | int) -> Pair:
    if isinstance(atom, int):
        return Pair(Index.of(atom), lambda values: atom)
    return Pair(Index.of(atom), lambda values: values[atom])


NUMBERS: Final = st.integers(-9, 9).map(leaf)
SYMBOLS: Final = st.sampled_from((S0, S1)).map(leaf)
LEAVES: Final = st.one_of(st.sampled_from(AXES).map(leaf), SYMBOLS, NUMBERS)
DIVISORS: Final = st.one_of(
    st.integers(1, 12).map(leaf),
    SYMBOLS,
    st.integers(1, 4).map(lambda n: Pair(n * Index.of(S0), lambda values: n * values[S0])),
    st.just(Pair(Index.of(S0) * S1, lambda values: values[S0] * values[S1])),
    st.just(Pair(Index.of(S0) + S1, lambda values: values[S0] + values[S1])),
    st.just(Pair((Index.of(S0) + 1) // 2 + 1, lambda values: (values[S0] + 1) // 2 + 1)),
    st.just(Pair((Index.of(S0) + 2) * S1, lambda values: (values[S0] + 2) * values[S1])),
)


def combined(parts: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    def plus(a: Pair, b: Pair) -> Pair:
        return Pair(a.index + b.index, lambda v: a.number(v) + b.number(v))

    def minus(a: Pair, b: Pair) -> Pair:
        return Pair(a.index - b.index, lambda v: a.number(v) - b.number(v))

    def times(a: Pair, b: Pair) -> Pair:
        return Pair(a.index * b.index, lambda v: a.number(v) * b.number(v))

    def quotient(a: Pair, b: Pair) -> Pair:
        return Pair(a.index // b.index, lambda v: a.number(v) // b.number(v))

    def remainder(a: Pair, b: Pair) -> Pair:
        return Pair(a.index % b.index, lambda v: a.number(v) % b.number(v))

    def between(a: Pair, b: Pair) -> Pair:
        """Clamped to 0 and a size: an axis in it would be no size."""
        if a.index.axes:
            return a
        return Pair(
            clamped(a.index, ZERO, b.index), lambda v: max(0, min(a.number(v), b.number(v)))
        )

    return st.one_of(
        *(st.builds(f, parts, parts) for f in (plus, minus, times)),
        st.builds(between, parts, DIVISORS),
        *(st.builds(f, parts, DIVISORS) for f in (quotient, remainder)),
    )


PAIRS: Final = st.recursive(LEAVES, combined, max_leaves=8)
SIZES: Final = st.recursive(st.one_of(SYMBOLS, NUMBERS), combined, max_leaves=5)


@st.composite
def environments(draw: Any) -> Values:
    """Values of axes and symbols; no axis is empty."""
    values: Values = {S0: draw(st.integers(1, 6)), S1: draw(st.integers(1, 6))}
    for axis in AXES:
        values[axis] = draw(st.integers(0, evaluate(axis.size, values) - 1))
    return values


@settings(max_examples=400, deadline=None)
@given(PAIRS, environments())
def test_simplification_keeps_the_value(pair: Pair, values: Values) -> None:
    assert evaluate(pair.index, values) == pair.number(values)


@settings(max_examples=400, deadline=None)
@given(PAIRS, environments())
def test_bounds_hold(pair: Pair, values: Values) -> None:
    low, high = lower_bound(pair.index), upper_bound(pair.index)
    number = pair.number(values)

    assert low is None or (not low.axes and evaluate(low, values) <= number)
    assert high is None or (not high.axes and number <= evaluate(high, values))


@settings(max_examples=200, deadline=None)
@given(PAIRS, environments(), st.sampled_from(AXES))
def test_an_axis_moves_the_index_by_its_factor(pair: Pair, values: Values, axis: Axis) -> None:
    factor = pair.index.factor_of(axis)
    assume(factor is not None and values[axis] + 1 < evaluate(axis.size, values))
    assert factor is not None

    moved = pair.number({**values, axis: values[axis] + 1}) - pair.number(values)
    assert evaluate(factor, values) == moved


@settings(max_examples=200, deadline=None)
@given(PAIRS, PAIRS, environments(), st.sampled_from(AXES))
def test_replacing_an_axis_is_substitution(
    pair: Pair, other: Pair, values: Values, axis: Axis
) -> None:
    # The new value has to lie in the axis's range: simplification relied on it.
    value = other.number(values)
    assume(0 <= value < evaluate(axis.size, values))

    replaced = pair.index.replaced({axis: other.index})
    assert evaluate(replaced, values) == pair.number({**values, axis: value})


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(-2, 2), st.integers(0, 6), st.integers(0, 6))
def test_what_is_known_to_reach_a_number_reaches_it(
    size: Pair, number: int, s0: int, s1: int
) -> None:
    try:
        value = size.number({S0: s0, S1: s1})
    except ZeroDivisionError:
        return  # a division by an empty size: no kernel evaluates it

    assert value >= number or not is_at_least(size.index, number)


@settings(max_examples=200, deadline=None)
@given(PAIRS, PAIRS)
def test_equal_sums_are_one_object(one: Pair, other: Pair) -> None:
    assert one.index + other.index is other.index + one.index
    assert one.index * other.index is other.index * one.index
    assert one.index - one.index is ZERO


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((4 * I1 + I0) // 4, "i1"),
        ((4 * I1 + I0) % 4, "i0"),
        ((I2 + I0 * Index.of(S0)) // S0, "i0"),
        ((I2 + I0 * Index.of(S0)) % S0, "i2"),
        (4 * (I1 // 4) + I1 % 4, "i1"),
        (I0 * 0, "0"),
        (I0 - I0 - 3, "-3"),
        (I1 // 1, "i1"),
        (I5 // 2, "0"),
    ],
)
def test_reshapes_leave_no_division(index: Index, text: str) -> None:
    assert str(index) == text


def test_factors_of_axes() -> None:
    index = 6 * I0 * S0 + 2 * I1 + I2 // 3

    assert index.factor_of(AXES[0]) is 6 * Index.of(S0)
    assert index.factor_of(AXES[1]) is Index.of(2)
    assert index.factor_of(AXES[2]) is None
    assert index.factor_of(AXES[3]) is ZERO
    assert (I0 * I0).factor_of(AXES[0]) is None


def test_a_quotient_and_its_remainder_are_the_whole_also_by_symbols() -> None:
    whole, n, m = Index.of(Axis("j", Index.of(S0) * S1)), Index.of(S0), Index.of(S1)

    assert n * (whole // n) + whole % n is whole
    assert 3 * n * m * (whole // n) + 3 * m * (whole % n) is 3 * m * whole
    assert n * m * (whole // (n * m)) + whole % (n * m) is whole
    assert (n * (whole // m) + whole % n) is not whole


def test_a_signed_symbol_is_not_known_to_be_natural() -> None:
    size, number = Index.of(Symbol("n")), Index.of(Symbol("k", is_signed=True))

    assert is_at_least(size, 0)
    assert not is_at_least(number, 0)
    assert not is_at_least(size * number, 0)
    assert not is_at_least(number // 2, 0)
    assert is_at_least(number % 2, 0)


# Quotients of sizes


def test_windows_of_any_length_give_back_their_row() -> None:
    count = (Index.of(S0) - 1) // 2 + 1
    row, column = Axis("row", count), Axis("column", count)
    flat = (Index.of(I2) * count + row) * count + column

    assert flat // count % count is Index.of(row)
    assert flat % count is Index.of(column)
    assert flat // (count * count) is I2


def test_a_number_leaves_a_quotient() -> None:
    length = Index.of(S0)

    assert (length - 1) // 2 + 1 is (length + 1) // 2
    assert (length + 7) // 3 is (length + 1) // 3 + 2


@pytest.mark.parametrize("by", [2, 3, 5])
def test_quotients_are_compared_by_what_they_round(by: int) -> None:
    length = Index.of(S0)

    assert is_at_least((length + 1) // by - length // by, 0)
    assert is_at_least(length // by + 1 - (length + by - 1) // by, 0)
    assert is_at_least(length - length // by * by, 0)
    assert is_at_least(length // by * by - length, 1 - by)
    assert not is_at_least(length // by - (length + 1) // by, 0)
    assert not is_at_least(length // by * by - length, 2 - by)


def test_what_bounds_settle_is_not_clamped() -> None:
    length = Index.of(S0)

    assert clamped(length + 1, ZERO, length) is length
    assert clamped(length, ZERO, length + S1) is length
    assert clamped(-length, ZERO, length) is ZERO
    assert isinstance(clamped(length - 1, ZERO, length).terms[0][0][0], Clamped)
