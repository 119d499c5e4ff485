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
from stator.loops.values import flat, unflat

S0, S1 = Symbol("s0"), Symbol("s1")
SIGNED = Symbol("k", is_signed=True)
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
ANY_SYMBOL: Final = st.sampled_from((S0, S1, SIGNED)).map(leaf)
LEAVES: Final = st.one_of(st.sampled_from(AXES).map(leaf), ANY_SYMBOL, NUMBERS)
DIVISORS: Final = st.one_of(
    st.integers(1, 12).map(leaf),
    SYMBOLS,
    st.integers(1, 4).map(lambda n: Pair(n * Index.of(S0), lambda values: n * values[S0])),
    st.just(Pair(Index.of(S0) * S1, lambda values: values[S0] * values[S1])),
    st.just(Pair(Index.of(S0) + S1, lambda values: values[S0] + values[S1])),
    st.just(Pair((Index.of(S0) + 1) // 2 + 1, lambda values: (values[S0] + 1) // 2 + 1)),
    st.just(Pair((Index.of(S0) + 2) * S1, lambda values: (values[S0] + 2) * values[S1])),
)


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


def combined(parts: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
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
SIZES: Final = st.recursive(st.one_of(ANY_SYMBOL, NUMBERS), combined, max_leaves=5)


@st.composite
def environments(draw: Any) -> Values:
    """Values of axes and symbols; no axis is empty."""
    values: Values = {S0: draw(st.integers(1, 6)), S1: draw(st.integers(1, 6))}
    values[SIGNED] = draw(st.integers(-40, 40))
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
@given(SIZES, st.integers(-2, 2), st.integers(0, 6), st.integers(0, 6), st.integers(-9, 9))
def test_what_is_known_to_reach_a_number_reaches_it(
    size: Pair, number: int, s0: int, s1: int, signed: int
) -> None:
    try:
        value = size.number({S0: s0, S1: s1, SIGNED: signed})
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


# Divisions of divisions, as flattening and unflattening leave them

PARTS: Final = (2, 3, 4, 6, 7, 8, 12, 14, 24, 28)
LONG: Final = (
    *(Axis(f"j{n}", Index.of(n)) for n in (2, 4, 12, 14, 84)),
    Axis("j", 6 * Index.of(S0)),
    Axis("jj", Index.of(S0) * S1),
)
OPERANDS: Final = (*LONG, S0, S1, SIGNED)
# What divides and what multiplies: numbers with factors in common, sometimes with sizes.
UNITS: Final = st.builds(
    times,
    st.sampled_from((1, *PARTS)).map(leaf),
    st.sampled_from([leaf(1), leaf(1), leaf(S0), times(leaf(S0), leaf(S1))]),
)


@st.composite
def programs(draw: Any) -> list[Pair]:
    """Numbers made of each other: sums of multiples, their quotients and remainders."""
    made = [leaf(atom) for atom in draw(st.permutations(OPERANDS))[:4]]
    for _ in range(draw(st.integers(2, 7))):
        a, b = (draw(st.sampled_from(made)) for _ in range(2))
        unit, number = draw(UNITS), leaf(draw(st.integers(1, 9)))
        whole, left = quotient(a, unit), remainder(a, unit)
        match draw(st.sampled_from(("sum", "difference", "parts", "joint"))):
            case "sum":
                made.append(plus(times(a, unit), b))
            case "difference":
                made.append(minus(minus(times(a, unit), b), number))
            case "parts":
                made += [whole, left]
            case "joint":  # what was taken apart, one part cut again; something in between
                joint = times(number, plus(times(unit, remainder(whole, number)), left))
                made.append(plus(joint, b))
    return made


@st.composite
def long_environments(draw: Any) -> Values:
    """Values of what programs start from."""
    values: Values = {S0: draw(st.integers(1, 6)), S1: draw(st.integers(1, 6))}
    values[SIGNED] = draw(st.integers(-400, 400))
    for axis in LONG:
        values[axis] = draw(st.integers(0, evaluate(axis.size, values) - 1))
    return values


@settings(max_examples=600, deadline=None)
@given(programs(), st.lists(long_environments(), min_size=3, max_size=3))
def test_divisions_of_divisions_keep_their_value(made: list[Pair], several: list[Values]) -> None:
    for values in several:
        for pair in made:
            number = pair.number(values)
            low, high = lower_bound(pair.index), upper_bound(pair.index)

            assert evaluate(pair.index, values) == number
            assert low is None or evaluate(low, values) <= number
            assert high is None or number <= evaluate(high, values)


C: Final = Index.of(Axis("c", Index.of(512)))
WIDER: Final = Index.of(Axis("w", Index.of(513)))
R: Final = Index.of(Axis("r", Index.of(784)))
K: Final = Index.of(SIGNED)
N: Final = Index.of(S0)
ANY: Final = Index.of(Axis("x", Index.of(1000)))


@pytest.mark.parametrize(
    ("value", "by", "quotient", "remainder"),
    [
        (512 * R + C, 14336, "(r // 28)", "512*(r % 28) + c"),
        (512 * R + C - 512, 14336, "((r + 27) // 28) - 1", "512*((r + 27) % 28) + c"),
        (512 * R - C + 511, 14336, "(r // 28)", "512*(r % 28) - c + 511"),
        (512 * K + C, 14336, "(k // 28)", "512*(k % 28) + c"),  # k may be negative
        (512 * K - 512 * R + C, 1024, "((k - r) // 2)", "512*((k - r) % 2) + c"),
        (4 * ANY, 6, "((2*x) // 3)", "2*((2*x) % 3)"),
        (4 * ANY + 1, 6, "((2*x) // 3)", "2*((2*x) % 3) + 1"),
        # Whatever of its divisors is the largest; what is left may be a division as well.
        (12 * ANY + 3 * I0, 24, "(x // 2)", "12*(x % 2) + 3*i0"),
        (14 * ANY + R // 56, 28, "(x // 2)", "(r // 56) + 14*(x % 2)"),
        # By sizes:
        (N * ANY + I2, 3 * N, "(x // 3)", "(x % 3)*s0 + i2"),
        (3 * ANY + I0 // 2, 3 * N + 3, "(x // (s0 + 1))", "(i0 // 2) + 3*(x % (s0 + 1))"),
        # Not so:
        (512 * R + WIDER, 14336, *(f"((512*r + w) {s} 14336)" for s in ("//", "%"))),
        (512 * R - C, 14336, *(f"((-c + 512*r) {s} 14336)" for s in ("//", "%"))),
        (512 * R + C + 1, 14336, *(f"((c + 512*r + 1) {s} 14336)" for s in ("//", "%"))),
        (512 * R + K, 14336, *(f"((k + 512*r) {s} 14336)" for s in ("//", "%"))),
        (K * ANY, 3 * K, *(f"((k*x) {s} (3*k))" for s in ("//", "%"))),
    ],
)
def test_a_factor_in_common_leaves_a_division(
    value: Index, by: Index | int, quotient: str, remainder: str
) -> None:
    assert str(value // by) == quotient
    assert str(value % by) == remainder


def test_what_is_divided_by_nothing_stays() -> None:
    assert str((4 * ANY + I0) // ZERO) == "((i0 + 4*x) // 0)"
    assert str((4 * (ANY % 6) + I0) % ZERO) == "((4*(x % 6) + i0) % 0)"


@pytest.mark.parametrize(
    ("value", "by", "quotient", "remainder"),
    [
        (ANY // 7, 5, "(x // 35)", "((x // 7) % 5)"),
        (ANY % 35, 5, "((x // 5) % 7)", "(x % 5)"),
        (ANY % (3 * N), N, "((x // s0) % 3)", "(x % s0)"),
        (ANY % 35, 6, "((x % 35) // 6)", "((x % 35) % 6)"),
        (6 * (ANY % 6) + I0, 9, "(((i0 + 6*x) // 9) % 4)", "((i0 + 6*x) % 9)"),
        (6 * (ANY % 6) + I1, 9, "((6*(x % 6) + i1) // 9)", "((6*(x % 6) + i1) % 9)"),
        (6 * (ANY % 6) + I0, 8, "((6*(x % 6) + i0) // 8)", "((6*(x % 6) + i0) % 8)"),
        (ANY // 7 + 3 * I1, 5, "((21*i1 + x) // 35)", "(((x // 7) + 3*i1) % 5)"),
        (2 * (ANY // 7) + I1, 5, "((2*(x // 7) + i1) // 5)", "((2*(x // 7) + i1) % 5)"),
        (N // 7 + 3, 5, "(((s0 // 7) + 3) // 5)", "(((s0 // 7) + 3) % 5)"),  # of sizes alone
    ],
)
def test_divisions_of_divisions_become_one(
    value: Index, by: Index | int, quotient: str, remainder: str
) -> None:
    assert str(value // by) == quotient
    assert str(value % by) == remainder


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (14336 * (R // 28) + 512 * (R % 28) + 401408 * I1 + C, "c + 401408*i1 + 512*r"),
        ((512 * R + C) // 14336 * 14336 + R % 28 * 512 + C + N, "c + 512*r + s0"),
        ((512 * R + C) // 14336 * 14336 + (512 * R + C) % 14336, "c + 512*r"),
        (28 * (ANY // 28 % 4) + ANY % 28, "(x % 112)"),
        (28 * N * I1 * (ANY // 28 % 4) + N * I1 * (ANY % 28), "(x % 112)*i1*s0"),
        (112 * (ANY // 112) + 28 * (ANY // 28 % 4) + ANY % 28, "x"),
        (N * (ANY // N % 3) + ANY % N, "(x % (3*s0))"),
        (6 * ((ANY // 6 + 7 * I1) % 5) + ANY % 6, "((42*i1 + x) % 30)"),
        # Not so: another factor, another number, another quotient.
        (27 * (ANY // 28 % 4) + ANY % 28, "27*((x // 28) % 4) + (x % 28)"),
        (28 * (ANY // 14 % 4) + ANY % 28, "28*((x // 14) % 4) + (x % 28)"),
        (28 * (R // 28 % 4) + ANY % 28, "28*((r // 28) % 4) + (x % 28)"),
    ],
)
def test_what_was_taken_apart_is_put_together(index: Index, text: str) -> None:
    assert str(index) == text


@st.composite
def shapes(draw: Any, elements: int) -> list[Index]:
    """A shape of so many elements, of at most four dimensions."""
    size = []
    for _ in range(draw(st.integers(0, 3))):
        size.append(draw(st.sampled_from([n for n in range(1, elements + 1) if elements % n == 0])))
        elements //= size[-1]
    return [Index.of(n) for n in draw(st.permutations([*size, elements]))]


@st.composite
def reshapes(draw: Any) -> tuple[Index, list[Index], list[Index], list[Index]]:
    """The number of an element of some shape, and three others; the last one refines the second."""
    elements = draw(st.sampled_from((24, 36, 60, 112, 144, 210, 784, 1568)))
    first = draw(shapes(elements))
    other = draw(shapes(elements))
    finer = [part for size in other for part in draw(shapes(size.constant or 1))]
    point = [Index.of(Axis(f"i{d}", n)) if n.constant != 1 else ZERO for d, n in enumerate(first)]
    return flat(point, first), draw(shapes(elements)), other, finer


@settings(max_examples=300, deadline=None)
@given(reshapes())
def test_the_way_of_reshapes_leaves_no_trace(
    case: tuple[Index, list[Index], list[Index], list[Index]],
) -> None:
    number, first, second, finer = case

    assert unflat(flat(unflat(number, first), first), second) == unflat(number, second)
    assert flat(unflat(number, second), second) is number
    assert flat(unflat(number, finer), finer) is number


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
