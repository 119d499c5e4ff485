"""Logarithms."""

from __future__ import annotations

from typing import Final

from stator.codegen.llvm.math_value import (
    Value,
    absolute,
    bits,
    fma,
    from_bits,
    polynomial,
    select,
    to_float,
    widened,
)

LN2: Final = 0.6931471805599453
_INF: Final = float("inf")
_NAN: Final = float("nan")
_EXPONENT_F32: Final = -(1 << 23)  # mask of the sign and the exponent
_EXPONENT_F64: Final = -(1 << 52)
_TWO_THIRDS_F32: Final = 0x3F2AAAAB
_THREE_QUARTERS_F32: Final = 0x3F400000
_FOUR_F32: Final = 0x40800000
# (log(1 + f) - f + f²/2) / f³ for |f| ≤ 1/3
_LOG_F32: Final = (
    0.333332151, -0.249997839, 0.200104773, -0.166812047,
    0.140044361, -0.121730298, 0.139925629, -0.129459605,
)  # fmt: skip
# the same for -1/4 ≤ f ≤ 1/2
_LOG1P_F32: Final = (
    0.333333403, -0.250001669, 0.199995652, -0.166551605, 0.142771557,
    -0.127313673, 0.116962135, -0.0908686295, 0.0373870656,
)  # fmt: skip
_LOG2_E: Final = (1.4426950216293335, 1.925963033500011e-08)
_LOG10_E: Final = (0.4342944920063019, -1.0103049952192578e-08)
_LOG10_2: Final = (0.3010300099849701, -1.432098883924482e-08)
# log2(1 + f) / f for |f| ≤ 1/3, to 2**-33
_LOG2_APPROXIMATE: Final = (
    1.4426950407474748, -0.721347519623681, 0.48089843779489894, -0.3606739688435607,
    0.28852959048268895, -0.24043415151144085, 0.206454228056594, -0.1807959886359611,
    0.15432627214267045, -0.13755156578320105, 0.1760793692113769, -0.16580981288638896,
)  # fmt: skip
_TWO_THIRDS_F64: Final = 0x3FE5555555555555
_ROOT_OF_HALF_F64: Final = 0x3FE6A09E667F3BCD
_ONE_F64: Final = 0x3FF0000000000000
_LN2_F64: Final = (0.6931471803691238, 1.9082149292705877e-10)
# (log((1 + s) / (1 - s)) / s - 2) / s² in s² for |s| ≤ 3 - sqrt(8)
_LOG_F64: Final = (
    0.6666666666666735, 0.39999999999412755, 0.2857142874289735, 0.22222198512912028,
    0.18183567852602825, 0.15313950687903935, 0.1479704147164065,
)  # fmt: skip


def _split_f32(x: Value) -> tuple[Value, Value]:
    """e and f with x = 2**e (1 + f), |f| ≤ 1/3, for positive x."""
    is_small = x < 2.0**-126
    x = select(is_small, x * 2.0**23, x)
    exponent = (bits(x) - _TWO_THIRDS_F32) & _EXPONENT_F32
    shift = select(is_small, x.like(-23.0), 0.0)
    return fma(to_float(exponent), 2.0**-23, shift), from_bits(bits(x) - exponent) - 1.0


def _limits(x: Value, result: Value) -> Value:
    """The logarithm of x: `result`, unless x is no positive finite number."""
    beyond = select(x.equals(0.0), x.like(-_INF), _NAN)
    return select(x > 0.0, select(x < _INF, result, x), beyond)


def _log_parts_f32(x: Value) -> tuple[Value, Value, Value]:
    """e, f and g with log(x) = e ln 2 + f + g f², g f² much smaller than f."""
    e, f = _split_f32(x)
    return e, f, fma(polynomial(f, _LOG_F32), f, -0.5)


def log_f32(x: Value) -> Value:
    """log(x)"""
    e, f, g = _log_parts_f32(x)
    return _limits(x, fma(e, LN2, fma(g, f * f, f)))


def log2_f32(x: Value) -> Value:
    """log(x) / log(2)"""
    e, f, g = _log_parts_f32(x)
    return _limits(x, e + _product(f, g * (f * f), _LOG2_E))


def log10_f32(x: Value) -> Value:
    """log(x) / log(10)"""
    e, f, g = _log_parts_f32(x)
    small = fma(e, _LOG10_2[1], _product(f, g * (f * f), _LOG10_E))
    return _limits(x, fma(e, _LOG10_2[0], small))


def _product(f: Value, tail: Value, factor: tuple[float, float]) -> Value:
    """(f + tail) * factor, the factor in two parts."""
    high, low = factor
    return fma(f, high, fma(tail, high, f * low))


def log1p_f32(x: Value) -> Value:
    """e ln 2 + log(1 + f) with 1 + x = 2**e (1 + f)"""
    exponent = (bits(x + 1.0) - _THREE_QUARTERS_F32) & _EXPONENT_F32
    # f = x / 2**e + (1 / 2**e - 1), without ever rounding 1 + x
    inverse = from_bits(_FOUR_F32 - exponent)
    f = from_bits(bits(x) - exponent) + fma(inverse, 0.25, -1.0)
    e = to_float(exponent) * 2.0**-23
    g = fma(polynomial(f, _LOG1P_F32), f, -0.5)
    result = fma(e, LN2, fma(g, f * f, f))
    return _limits(x + 1.0, select(absolute(x) < 2.0**-25, x, result))  # the zero has a sign


def log2_approximate(x: Value) -> Value:
    """log2 of a positive normal f64 to 2**-33: enough for a result in f32"""
    exponent = (bits(x) - _TWO_THIRDS_F64) & _EXPONENT_F64
    e = to_float(exponent >> 52)
    return _log2_of_parts(e, from_bits(bits(x) - exponent) - 1.0)


def _log2_of_parts(e: Value, f: Value) -> Value:
    """log2(2**e (1 + f)) to 2**-33, for f64 with |f| ≤ 1/3."""
    return fma(polynomial(f, _LOG2_APPROXIMATE), f, e)


def log2_wide_f32(x: Value) -> Value:
    """log2 of an f32 ≥ 0, as f64 to 2**-33."""
    e, f = _split_f32(x)
    return _limits(widened(x), _log2_of_parts(widened(e), widened(f)))


def log_f64(x: Value) -> Value:
    """log(x)"""
    is_small = x < 2.0**-1022
    normal = select(is_small, x * 2.0**52, x)
    exponent = (bits(normal) - _ROOT_OF_HALF_F64) & _EXPONENT_F64
    e = to_float(exponent >> 52) + select(is_small, x.like(-52.0), 0.0)
    f = from_bits(bits(normal) - exponent) - 1.0
    return _limits(x, _sum_f64(e, f, e * _LN2_F64[1]))


def _sum_f64(e: Value, f: Value, small: Value) -> Value:
    """e ln 2 + log(1 + f), where `small` holds what e times the high part of ln 2 lacks.

    With s = f / (2 + f) and h = f²/2, log(1 + f) = f - h + s (h + s² p(s²)).
    """
    s = f / (f + 2.0)
    square = s * s
    half = f * f * 0.5
    tail = fma(s, fma(polynomial(square, _LOG_F64), square, half), small)
    return fma(e, _LN2_F64[0], f - (half - tail))


def log1p_f64(x: Value) -> Value:
    """log(1 + x)"""
    grown = x + 1.0
    exponent = (bits(grown) - _ROOT_OF_HALF_F64) & _EXPONENT_F64
    e = to_float(exponent >> 52)
    # f = x / 2**e + (1 / 2**e - 1), without ever rounding 1 + x; where 1 is nothing beside x the
    # inverse may be no normal number
    inverse = from_bits(_ONE_F64 - exponent)
    f = fma(x, inverse, inverse - 1.0)
    f = select(x > 2.0**60, from_bits(bits(grown) - exponent) - 1.0, f)
    result = _sum_f64(e, f, e * _LN2_F64[1])
    return _limits(grown, select(absolute(x) < 2.0**-54, x, result))  # the zero has a sign
