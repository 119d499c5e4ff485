"""Exponentials: exp, exp2, expm1 and the hyperbolic functions, for f32 and f64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.math_value import (
    DOUBLE,
    FLOAT,
    Value,
    absolute,
    at_least,
    at_most,
    bits,
    copy_sign,
    fma,
    narrowed,
    polynomial,
    power_of_two,
    raised,
    select,
    widened,
)

LOG2_E: Final = 1.4426950408889634
LIFT: Final = 64  # powers of two between the least normal number and those that a step is made in
TOO_LARGE: Final = {FLOAT: 2.0**127, DOUBLE: 2.0**1023}  # times more than 2


@dataclass(frozen=True, slots=True)
class _Constants:
    """What differs between the widths."""

    # Added and taken away again it rounds to an integer, which the low bits of the sum hold:
    # cheaper than a conversion, and unlike one defined for NaN.
    rounder: float
    rounder_bits: int
    # ln 2 in two parts; the first has zeros at its end, so that its multiples are exact.
    ln2: tuple[float, float]
    # Whether expm1 needs what rounding x - n ln 2 loses.  f32 does not: its ln 2 is nearly exact.
    keeps_remainder: bool
    # Beyond these exp gives 0 or inf, and so it does at them; the same for exp2.
    bounds: tuple[float, float]
    normal_above: float  # exp gives normal numbers there
    finite_up_to: float  # and numbers there
    bounds_of_exp2: tuple[float, float]
    epsilon: float  # less than half an ulp of 1
    minus_one_below: float  # expm1 is -1 there
    one_above: float  # tanh is 1 there
    exp: tuple[float, ...]  # (exp(r) - 1 - r) / r² for |r| ≤ ln(2)/2, relative to exp(r)
    expm1: tuple[float, ...]  # the same relative to expm1(r)
    exp2: tuple[float, ...]  # (2**r - 1) / r for |r| ≤ 1/2
    sinh: tuple[float, ...]  # (sinh(x)/x - 1) / x² in x² for |x| ≤ 1


_OF: Final[Mapping[str, _Constants]] = {
    FLOAT: _Constants(
        rounder=1.5 * 2.0**23,
        rounder_bits=0x4B400000,
        ln2=(0.693145751953125, 1.4286067653301906e-06),
        keeps_remainder=False,
        bounds=(-104.0, 89.0),
        normal_above=-87.0,
        finite_up_to=88.72283172607422,
        bounds_of_exp2=(-151.0, 129.0),
        epsilon=2.0**-25,
        minus_one_below=-18.0,
        one_above=9.5,
        exp=(0.5, 0.166664869, 0.0416655503, 0.00837241486, 0.00140340405),
        expm1=(
            0.5, 0.166666359, 0.0416665114, 0.00834150985, 0.0013930545, 0.000150166423,
        ),
        exp2=(
            0.693147182, 0.240225941, 0.0555036627, 0.00962543953, 0.00133879564, 0.000133379886,
        ),
        sinh=(0.166666672, 0.00833331048, 0.000198428956, 2.78221319e-06),
    ),
    DOUBLE: _Constants(
        rounder=1.5 * 2.0**52,
        rounder_bits=0x4338000000000000,
        ln2=(0.6931471803691238, 1.9082149292705877e-10),
        keeps_remainder=True,
        bounds=(-746.0, 710.0),
        normal_above=-708.0,
        finite_up_to=709.782712893384,
        bounds_of_exp2=(-1076.0, 1025.0),
        epsilon=2.0**-54,
        minus_one_below=-40.0,
        one_above=20.0,
        exp=(
            0.5, 0.16666666666666688, 0.041666666666666845, 0.008333333333312817,
            0.001388888888875608, 0.00019841269906589645, 2.480158763185876e-05,
            2.755722492310264e-06, 2.7556977423167135e-07, 2.5115408479601918e-08,
            2.1014581353419846e-09,
        ),
        expm1=(
            0.5, 0.16666666666666677, 0.04166666666666671, 0.00833333333332029,
            0.0013888888888842264, 0.0001984126988990597, 2.4801587440740605e-05,
            2.7557240082013105e-06, 2.755714934394352e-07, 2.5110570113070194e-08,
            2.0960409091728796e-09,
        ),
        exp2=(
            0.6931471805599453, 0.24022650695910072, 0.05550410866482169, 0.009618129107628328,
            0.0013333558146392407, 0.0001540353039364279, 1.5252733854618928e-05,
            1.3215486593742033e-06, 1.0178051806064928e-07, 7.054974729480442e-09,
            4.456592517266057e-10, 2.562531484712537e-11,
        ),
        sinh=(
            0.16666666666666669, 0.008333333333333148, 0.00019841269841431875,
            2.7557319157070747e-06, 2.5052123136887944e-08, 1.6057259756633064e-10,
            7.75874915179591e-13,
        ),
    ),
}  # fmt: skip


def _rounded(x: Value, factor: float) -> tuple[Value, Value]:
    """The integer nearest to x * factor, as a float and as an integer."""
    constants = _OF[x.type]
    shifted = fma(x, factor, constants.rounder)
    return shifted - constants.rounder, bits(shifted) - constants.rounder_bits


def _reduced(x: Value) -> tuple[Value, Value]:
    """r and n with x = n ln 2 + r, |r| ≤ ln(2)/2."""
    high, low = _OF[x.type].ln2
    whole, n = _rounded(x, LOG2_E)
    return fma(whole, -low, fma(whole, -high, x)), n


def _scaled(x: Value, exponent: Value) -> Value:
    """x * 2**exponent, where 2**exponent alone may be no normal number."""
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


def _exp_of_reduced(r: Value) -> Value:
    return fma(fma(polynomial(r, _OF[r.type].exp), r, 1.0), r, 1.0)


def _expm1_of_reduced(r: Value) -> Value:
    """exp(r) - 1, as exact as exp(r) needs it."""
    return fma(r * r, polynomial(r, _OF[r.type].exp), r)


def _expm1_parts(x: Value) -> tuple[Value, Value]:
    """expm1(r) and n with x = n ln 2 + r, |r| ≤ ln(2)/2."""
    constants = _OF[x.type]
    high, low = constants.ln2
    whole, n = _rounded(x, LOG2_E)
    rest = fma(whole, -high, x)
    r = fma(whole, -low, rest)
    curve = polynomial(r, constants.expm1)
    if not constants.keeps_remainder:
        return fma(r * r, curve, r), n
    remainder = fma(whole, -low, rest - r)
    return fma(r * r, curve, remainder) + r, n


def exp(x: Value) -> Value:
    """exp(x)"""
    constants = _OF[x.type]
    r, n = _reduced(at_least(x, constants.bounds[0]))  # below it the exponents would wrap
    result = raised(_exp_of_reduced(r), n)
    is_tiny = x < constants.normal_above
    result = select(is_tiny, raised(result, LIFT) * 2.0**-LIFT, result)
    # Beyond what is finite: NaN, or a product that is too large.
    return select(x <= constants.finite_up_to, result, x * x.like(TOO_LARGE[x.type]))


def exp_of_moderate(x: Value) -> Value:
    """exp(x) where neither the result nor its inverse is below the normal numbers."""
    r, n = _reduced(x)
    return raised(_exp_of_reduced(r), n)


def exp_of_sum_times(x: Value, small: Value, factor: Value) -> Value:
    """exp(x + small) * factor, rounded once; x within the bounds, `small` less than its ulp."""
    r, n = _reduced(x)
    growth = widened(_expm1_of_reduced(r + small))
    return _scaled(narrowed(fma(growth, factor, factor)), n)


def exp2(x: Value) -> Value:
    """2**x"""
    low, high = _OF[x.type].bounds_of_exp2
    x = at_most(at_least(x, low), high)
    whole, n = _rounded(x, 1.0)
    return _scaled(_exp2_of_reduced(x - whole), n)


def exp2_of_moderate(x: Value) -> Value:
    """2**x where neither it nor its inverse is below the normal numbers."""
    whole, n = _rounded(x, 1.0)
    return _exp2_of_reduced(x - whole) * power_of_two(n)


def exp2_of_parts(whole: Value, r: Value) -> Value:
    """2**(whole + r) for an integer and |r| ≤ 1/2, within the bounds of exp2."""
    _, n = _rounded(whole, 1.0)
    return _scaled(_exp2_of_reduced(r), n)


def _exp2_of_reduced(r: Value) -> Value:
    return fma(polynomial(r, _OF[r.type].exp2), r, 1.0)


def expm1(x: Value) -> Value:
    """exp(x) - 1"""
    constants = _OF[x.type]
    bounded = at_most(at_least(x, constants.minus_one_below), constants.bounds[1])
    reduced, n = _expm1_parts(bounded)
    # Half the result, since the power of two of the largest results is no number.
    scale = power_of_two(n - 1)
    result = fma(reduced, scale, scale - 0.5) * 2.0
    # Halving would round the smallest ones, and the zero would lose its sign.
    return select(absolute(x) < constants.epsilon, x, result)


def _half_exp(size: Value) -> Value:
    """exp(size) / 2 for size ≥ 0, which overflows no earlier than the hyperbolic functions."""
    r, n = _reduced(at_most(size, _OF[size.type].bounds[1] + 1.0))
    return _scaled(_exp_of_reduced(r), n - 1)


def sinh(x: Value) -> Value:
    """h - 1/(4h) with h = exp(|x|)/2, and the sign of x; a polynomial below 1"""
    size = absolute(x)
    half = _half_exp(size)
    square = size * size
    small = fma(polynomial(square, _OF[x.type].sinh), square * size, size)
    return copy_sign(select(size < 1.0, small, half - 0.25 / half), x)


def cosh(x: Value) -> Value:
    """h + 1/(4h) with h = exp(|x|)/2"""
    half = _half_exp(absolute(x))
    return half + 0.25 / half


def tanh(x: Value) -> Value:
    """t / (t + 2) with t = expm1(2|x|), and the sign of x"""
    reduced, n = _expm1_parts(at_most(absolute(x), _OF[x.type].one_above) * 2.0)
    scale = power_of_two(n)
    t = fma(reduced, scale, scale - 1.0)
    # The plain quotient is off by 2.4 ulp: correct it by the remainder, t + 2 being exact.
    high = t + 2.0
    low = t - (high - 2.0)
    inverse = 1.0 / high
    quotient = t * inverse
    remainder = fma(-quotient, low, fma(-quotient, high, t))
    return copy_sign(fma(remainder, inverse, quotient), x)
