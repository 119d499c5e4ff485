"""Sine, cosine and tangent of f32, right for every argument."""

from __future__ import annotations

from itertools import pairwise
from math import pi
from typing import Final

from stator.codegen.llvm.math_value import (
    Value,
    absolute,
    at_least,
    bits,
    fma,
    from_bits,
    narrowed,
    polynomial,
    select,
    shift_in,
    to_float,
    widened,
)

_INF: Final = float("inf")
_NAN: Final = float("nan")
# 26 zeros and the bits of 2/pi, in words of 64.
_TWO_OVER_PI: Final = (
    0x00000028BE60DB93, 0x91054A7F09D5F47D, 0x4D377036D8A5664F, 0x10E4107F9458EAF7,
)  # fmt: skip
# (sin(r)/r - 1) / r² and (cos(r) - 1 + r²/2) / r⁴ in r², for |r| ≤ pi/4
_SIN_F32: Final = (-0.166666552, 0.00833218731, -0.000195178975)
_COS_F32: Final = (0.0416666456, -0.00138873095, 2.44323273e-05)
# (tan(r)/r - 1) / r² in r², for |r| ≤ pi/4
_TAN: Final = (
    0.33333331822098994, 0.13333411667964115, 0.053954465228955716, 0.021985853666102007,
    0.00832689870986733, 0.005002075650893477, -0.0006058807458552839, 0.0020455182109361805,
)  # fmt: skip


def _product_with_two_over_pi(size: Value) -> Value:
    """2**62 times size * 2/pi modulo 4, for a positive float of at least 1/2 (Payne and Hanek).

    size is an integer of 25 bits times 2**(shift - 24): of the bits of 2/pi times 2**shift those
    of 4 and above add whole turns, and those beyond the first 96 below are too small to matter.
    """
    exponent = bits(size).shift_right_zero(23) - 127
    mantissa = (bits(size) & 0x7FFFFF) | 0x800000
    mantissa = widened(select(exponent < 0, mantissa, mantissa << 1))
    shift = widened(at_least(exponent, 0))
    is_far = shift >= 64
    words = [
        select(is_far, shift.like(after), shift.like(word))
        for word, after in pairwise(_TWO_OVER_PI)
    ]
    high = shift_in(words[0], words[1], shift)
    low = shift_in(words[1], words[2], shift).shift_right_zero(32)
    return mantissa * high + (mantissa * low).shift_right_zero(32)


def _turned(size: Value) -> tuple[Value, Value]:
    """n modulo 4 and r as f64 with size = n pi/2 + r, |r| ≤ pi/4, for size of at least 1/2."""
    product = _product_with_two_over_pi(size)
    quadrant = (product + (1 << 61)).shift_right_zero(62)
    r = to_float(product - (quadrant << 62)) * (pi / 2 * 2.0**-62)
    return narrowed(quadrant), r


def _reduced_f32(size: Value) -> tuple[Value, Value]:
    """n modulo 4 and r with size = n pi/2 + r, |r| ≤ pi/4."""
    quadrant, r = _turned(size)
    is_small = size < pi / 4
    return select(is_small, 0, quadrant), select(is_small, size, narrowed(r))


def _sine_of_quarter_turns(quadrant: Value, r: Value) -> Value:
    """sin(quadrant pi/2 + r)"""
    square = r * r
    sine = fma(polynomial(square, _SIN_F32), square * r, r)
    cosine = fma(polynomial(square, _COS_F32), square * square, fma(square, -0.5, 1.0))
    result = select((quadrant & 1).equals(0), sine, cosine)
    return from_bits(bits(result) ^ ((quadrant & 2) << 30))


def sin_f32(x: Value) -> Value:
    """sin(x)"""
    size = absolute(x)
    quadrant, r = _reduced_f32(size)
    result = _sine_of_quarter_turns(quadrant, r)
    sign = bits(x) & -(1 << 31)
    return select(size < _INF, from_bits(bits(result) ^ sign), _NAN)


def cos_f32(x: Value) -> Value:
    """sin(|x| + pi/2)"""
    size = absolute(x)
    quadrant, r = _reduced_f32(size)
    return select(size < _INF, _sine_of_quarter_turns(quadrant + 1, r), _NAN)


def tan_f32(x: Value) -> Value:
    """tan(r), or -1/tan(r) in odd quadrants; in f64, as both would round twice"""
    size = absolute(x)
    quadrant, turned = _turned(size)
    is_small = size < pi / 4
    r = select(is_small, widened(size), turned)
    square = r * r
    tangent = fma(polynomial(square, _TAN), square * r, r)
    is_even = select(is_small, 0, quadrant & 1).equals(0)
    result = narrowed(select(is_even, tangent, -1.0 / tangent))
    signed = from_bits(bits(result) ^ (bits(x) & -(1 << 31)))
    return select(size < _INF, signed, _NAN)
