"""Inverse trigonometric and hyperbolic functions.

They are of f32 and compute in f64, where cancellation and repeated rounding do no harm; atan,
the commonest, needs no f64.
"""

from __future__ import annotations

from math import pi
from typing import Final

from stator.codegen.llvm.math_log import LN2, log2_approximate
from stator.codegen.llvm.math_value import (
    Value,
    absolute,
    bits,
    copy_sign,
    fma,
    narrowed,
    polynomial,
    select,
    square_root,
    widened,
)

_INF: Final = float("inf")
_NAN: Final = float("nan")
_HALF_PI_EXCESS_F32: Final = 4.371139e-08  # of the f32 nearest to pi/2 over it
# (atan(z)/z - 1) / z² in z² for |z| ≤ 1, for f32 and f64
_ATAN_F32: Final = (
    -0.333332986, 0.199985296, -0.142640144, 0.109508529, -0.0839914456,
    0.0578769743, -0.0310907718, 0.0108643072, -0.00178159738,
)  # fmt: skip
_ATAN: Final = (
    -0.33333326899444654, 0.19999671121215576, -0.1427983304106333, 0.110582236574052,
    -0.08811091393608528, 0.06741597345666137, -0.04468994592869553, 0.022539871012767616,
    -0.0073179583494154205, 0.0011137890760198328,
)  # fmt: skip
# (asin(z)/z - 1) / z² in z² for |z| ≤ 1/2
_ASIN: Final = (
    0.16666659991459948, 0.07500504175419856, 0.044516956711000595, 0.03180770725477787,
    0.014438641756702487, 0.037516404687258045,
)  # fmt: skip


def atan_f32(x: Value) -> Value:
    """atan(z), with z = |x| or, above 1, pi/2 + atan(-1/|x|); with the sign of x"""
    size = absolute(x)
    is_large = size > 1.0
    z = select(is_large, -1.0 / size, size)
    square = z * z
    result = fma(polynomial(square, _ATAN_F32), square * z, z)
    turned = result - _HALF_PI_EXCESS_F32 + pi / 2
    return copy_sign(select(is_large, turned, result), x)


def atan2_f32(y: Value, x: Value) -> Value:
    """The angle of (x, y): atan of the lesser by the greater size, moved to its octant."""
    wide_y, wide_x = widened(absolute(y)), widened(absolute(x))
    is_steep = wide_y > wide_x
    low, high = select(is_steep, wide_x, wide_y), select(is_steep, wide_y, wide_x)
    # Division knows neither inf/inf, which is 1 here, nor 0/0, which is 0.
    z = select(low.equals(high), select(high > 0.0, high.like(1.0), 0.0), low / high)
    square = z * z
    angle = fma(polynomial(square, _ATAN), square * z, z)
    angle = select(is_steep, pi / 2 - angle, angle)
    angle = narrowed(select(bits(x) < 0, pi - angle, angle))
    is_nan = (absolute(x) + absolute(y)).is_nan()
    return select(is_nan, _NAN, copy_sign(angle, y))


def _asin_parts(x: Value) -> tuple[Value, Value]:
    """Whether |x| > 1/2, and as f64 acos|x| / 2 there, asin|x| below."""
    size = widened(absolute(x))
    is_large = size > 0.5
    square = select(is_large, fma(size, -0.5, 0.5), size * size)
    z = select(is_large, square_root(square), size)
    return is_large, fma(polynomial(square, _ASIN), square * z, z)


def asin_f32(x: Value) -> Value:
    """asin(x); above 1/2 by asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2))"""
    is_large, angle = _asin_parts(x)
    return copy_sign(narrowed(select(is_large, fma(angle, -2.0, pi / 2), angle)), x)


def acos_f32(x: Value) -> Value:
    """acos(x), by the same parts as asin(x)"""
    is_large, angle = _asin_parts(x)
    of_size = select(is_large, angle * 2.0, pi / 2 - angle)
    return narrowed(select(x < 0.0, pi - of_size, of_size))


def asinh_f32(x: Value) -> Value:
    """log(|x| + sqrt(x² + 1)), and the sign of x"""
    size = widened(absolute(x))
    grown = size + square_root(fma(size, size, 1.0))
    small = fma(size * size * (-1 / 6), size, size)
    result = select(size < 2.0**-10, small, log2_approximate(grown) * LN2)
    return copy_sign(select(absolute(x) < _INF, narrowed(result), x), x)


def acosh_f32(x: Value) -> Value:
    """log(x + sqrt(x² - 1))"""
    wide = widened(x)
    grown = wide + square_root(fma(wide, wide, -1.0))
    result = narrowed(log2_approximate(grown) * LN2)
    finite = select(x < _INF, result, x)
    return select(x >= 1.0, finite, _NAN)


def atanh_f32(x: Value) -> Value:
    """log((1 + |x|) / (1 - |x|)) / 2, and the sign of x"""
    size = widened(absolute(x))
    grown = (size + 1.0) / (1.0 - size)
    small = fma(size * size * (1 / 3), size, size)
    result = select(size < 2.0**-10, small, log2_approximate(grown) * (LN2 / 2))
    finite = select(size < 1.0, narrowed(result), _NAN)
    return copy_sign(select(size.equals(1.0), _INF, finite), x)


def hypot_f32(x: Value, y: Value) -> Value:
    """sqrt(x² + y²); infinite where one of them is, even if the other is NaN"""
    wide_x, wide_y = widened(x), widened(y)
    result = narrowed(square_root(fma(wide_x, wide_x, wide_y * wide_y)))
    is_infinite = absolute(x).equals(_INF) | absolute(y).equals(_INF)
    return select(is_infinite, _INF, result)
