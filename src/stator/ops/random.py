"""Random numbers in loops: each element from its own number; see draws.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Index, is_at_least, lower_bound
from stator.loops.ir import Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value, broadcast, flat, product
from stator.ops import draws
from stator.ops.arguments import settled
from stator.ops.table import lowers

_b = Body()

_DIGITS: Final = {
    DType.F64: draws.DIGITS[torch.float64],
    DType.F32: draws.DIGITS[torch.float32],
    DType.F16: draws.DIGITS[torch.float16],
    DType.BF16: draws.DIGITS[torch.bfloat16],
}
# Terms of sin's series that count up to a quarter turn.
_TERMS: Final = {DType.F32: 7, DType.F64: 11}

Draw = Callable[..., tuple[Expr, Expr]]  # two words for a point


def _numbered(
    t: Builder, result: Result, seed: Value, stream: int
) -> tuple[tuple[Expr, Expr], Callable[[Point], tuple[Expr, Expr]]]:
    """The key of a stream, and the number of a point, in two words."""
    start = *_seeded(t, seed, stream), const(0, DType.I32)
    return (_b.threefry_0(*start), _b.threefry_1(*start)), _number_of(result)


def _seeded(t: Builder, seed: Value, stream: int) -> tuple[Expr, Expr, Expr]:
    """The words of the seed, and the stream: handed over, so that layers share one kernel."""
    number = IndexValue(DType.I32, t.handed(stream))
    return seed.load((Index.of(0),)), seed.load((Index.of(1),)), number


def _number_of(result: Result) -> Callable[[Point], tuple[Expr, Expr]]:
    """The number of a point of the result, in two words."""
    total = product(result.size).constant
    few = total is not None and total <= 1 << 32

    def number_of(point: Point) -> tuple[Expr, Expr]:
        number = flat(point, result.size)
        above = const(0, DType.I32) if few else IndexValue(DType.I32, number // (1 << 32))
        return IndexValue(DType.I32, number), above

    return number_of


def _words(t: Builder, result: Result, seed: Value, stream: int) -> Draw:
    """Two random words for each point of the result."""
    key, number_of = _numbered(t, result, seed, stream)

    def draw(point: Point, block: int = 0) -> tuple[Expr, Expr]:
        low, high = number_of(point)
        counter = low, _b.xor(high, block) if block else high
        return _b.threefry_0(*key, *counter), _b.threefry_1(*key, *counter)

    return draw


def _one_word(t: Builder, result: Result, seed: Value, stream: int) -> Callable[[Point], Expr]:
    """A random word for each point of the result, of rounds that neighbours share."""
    if draws.takes_philox(result.device):
        seeded, number = _seeded(t, seed, stream), _number_of(result)
        return lambda point: _b.philox_one(*seeded, *number(point))
    key, number_of = _numbered(t, result, seed, stream)
    return lambda point: _b.threefry_one(*key, *number_of(point))


def _top(word: Expr, count: int) -> Expr:
    """The upper bits of a word, as a number that is not negative."""
    return _b.and_(_b.shr(word, 32 - count), (1 << count) - 1)


def _fractions(
    t: Builder, result: Result, seed: Value, stream: int, dtype: DType
) -> Callable[[Point], Expr]:
    """A number of [0, 1) for each point, with the digits of a type."""
    if dtype is DType.F64:
        words = _words(t, result, seed, stream)
        return lambda point: _wide_fraction(words(point))
    word, digits = _one_word(t, result, seed, stream), _DIGITS[dtype]
    return lambda point: _b.mul(cast(_top(word(point), digits), DType.F32), 2.0**-digits)


def _wide_fraction(words: tuple[Expr, Expr]) -> Expr:
    """A number of [0, 1) in f64."""
    low = _b.add(cast(words[0], DType.F64), 2.0**31)
    high = cast(_top(words[1], 21), DType.F64)
    return _b.mul(_b.fma(high, 2.0**32, low), 2.0 ** -_DIGITS[DType.F64])


@lowers(draws.uniform)
def uniform(
    t: Builder, result: Result, seed: Value, stream: int, bounds: Any, *options: Any
) -> Value:
    """low + (high - low) * u"""
    low, high = bounds
    fraction = _fractions(t, result, seed, stream, result.dtype)

    def load(point: Point) -> Expr:
        part = fraction(point)
        if (low, high) == (0, 1):
            return part
        inside = _b.add(_b.mul(part, high - low), float(low))
        return _b.min(inside, draws.largest_below(high, low, _DIGITS[result.dtype]))

    return Value(result.size, result.dtype, load)


@lowers(draws.normal)
def normal(t: Builder, result: Result, seed: Value, stream: int, *options: Any) -> Value:
    """sqrt(-2 log(u)) cos(2 pi v)"""
    draw = _words(t, result, seed, stream)

    def load(point: Point) -> Expr:
        if result.dtype is DType.F64:
            above_zero = _b.add(_wide_fraction(draw(point)), 2.0**-54)
            turn = _b.sub(_wide_fraction(draw(point, draws.SECOND_BLOCK)), 0.5)
        else:
            first, second = draw(point)
            above_zero = _b.fma(cast(_top(first, 31), DType.F32), 2.0**-31, _single(2.0**-32))
            turn = _b.mul(cast(second, DType.F32), 2.0**-32)
        return _b.mul(_b.sqrt(_b.mul(_b.log(above_zero), -2.0)), _cosine(turn))

    return Value(result.size, result.dtype, load)


def _single(value: float) -> Expr:
    return const(value, DType.F32)


def _cosine(turn: Expr) -> Expr:
    """cos(2 pi turn) for at most half a turn, as the sine of the angle left to a quarter turn."""
    angle = _b.mul(_b.sub(_b.const(0.25, turn), _b.abs(turn)), 2 * math.pi)
    square = _b.mul(angle, angle)
    factors = [(-1) ** k / math.factorial(2 * k + 1) for k in range(_TERMS[turn.dtype])]
    total = _b.const(factors[-1], turn)
    for factor in reversed(factors[:-1]):
        total = _b.fma(total, square, _b.const(factor, turn))
    return _b.mul(angle, total)


@lowers(draws.coins)
def coins(
    t: Builder, result: Result, seed: Value, stream: int, p: Any, *options: Any
) -> Value | None:
    """1 where u < p, else 0"""
    kind = result.dtype.computed_in
    if not isinstance(p, Value):
        limit = draws.threshold(p)
        if limit == 1 << 31:
            return Value(result.size, result.dtype, lambda _: const(1, kind))
        word = _one_word(t, result, seed, stream)
        return Value(result.size, result.dtype, lambda point: cast(_b.lt(word(point), limit), kind))
    chance = broadcast(p, result.size)
    wide = DType.F64 if p.dtype is DType.F64 else DType.F32
    fraction = _fractions(t, result, seed, stream, wide)

    def load(point: Point) -> Expr:
        return cast(_b.lt(fraction(point), chance.load(point)), kind)

    return Value(result.size, result.dtype, load)


@lowers(draws.integers)
def integers(
    t: Builder, result: Result, seed: Value, stream: int, bounds: Any, *options: Any
) -> Value:
    """low + floor(u * (high - low)), of 64 random bits"""
    low, high = (Index.of(bound) for bound in bounds)
    count = high - low
    least = lower_bound(count)
    if least is None or not is_at_least(least, 1):
        holds = _b.gt(IndexValue(DType.I64, count), 0)
        t.require(Value((), DType.BOOL, lambda _: holds), RuntimeError, draws.EMPTY_RANGE)
    draw = _words(t, result, seed, stream)

    def load(point: Point) -> Expr:
        words = [_b.and_(cast(word, DType.I64), draws.WORD) for word in draw(point)]
        number = _b.add(_scaled(words[0], words[1], count), IndexValue(DType.I64, low))
        return cast(number, result.dtype.computed_in)

    return Value(result.size, result.dtype, load)


def _scaled(first: Expr, second: Expr, count: Index) -> Expr:
    """The upper 64 bits of count times the 64 bits of two words: the product by halves."""
    whole = count.constant
    below: Expr = _b.and_(IndexValue(DType.I64, count), draws.WORD)
    above: Expr = _upper(IndexValue(DType.I64, count))
    if whole is not None:
        below, above = const(whole & draws.WORD, DType.I64), const(whole >> 32, DType.I64)
    middle = _b.add(_b.mul(second, below), _upper(_b.mul(first, below)))
    number = _upper(middle)
    if whole is not None and whole >> 32 == 0:
        return number
    rest = _upper(_b.add(_b.mul(first, above), _b.and_(middle, draws.WORD)))
    return _b.add(_b.add(number, _b.mul(second, above)), rest)


def _upper(value: Expr) -> Expr:
    """The upper half of 64 bits, as a number that is not negative."""
    return _b.and_(_b.shr(value, 32), draws.WORD)


@lowers(draws.require_between)
def require_between(
    t: Builder, result: Result, value: Value, low: float, high: float, message: str
) -> Value:
    """value, all of it in [low, high]"""
    value = settled(t, value, (Index.of(2), *value.size))

    def holds(point: Point) -> Expr:
        x = value.load(point)
        return _b.and_(_b.ge(x, low), _b.le(x, high))

    t.require(Value(value.size, DType.BOOL, holds), RuntimeError, message)
    return Value(result.size, result.dtype, value.load)
