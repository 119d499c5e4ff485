"""Powers."""

from __future__ import annotations

from typing import Final

from stator.codegen.llvm.math_exp import exp2_of_parts
from stator.codegen.llvm.math_log import log2_wide_f32
from stator.codegen.llvm.math_value import (
    Value,
    absolute,
    at_least,
    at_most,
    bits,
    from_bits,
    narrowed,
    nearest,
    select,
    truncated,
    widened,
)

_INF: Final = float("inf")
_NAN: Final = float("nan")
_SIGN_F32: Final = -(1 << 31)


def pow_f32(x: Value, y: Value) -> Value:
    """2**(y log2|x|), and a sign where y is odd; the logarithm in f64, as y magnifies its error"""
    size = absolute(x)
    exponent = at_most(at_least(widened(y) * log2_wide_f32(size), -151.0), 129.0)
    whole = nearest(exponent)
    magnitude = exp2_of_parts(narrowed(whole), narrowed(exponent - whole))

    half = y * 0.5
    is_integer = truncated(y).equals(y)
    is_odd = is_integer & (absolute(truncated(half) - half) > 0.0)
    sign = select(is_odd, bits(x) & _SIGN_F32, 0)
    signed = from_bits(bits(magnitude) | sign)
    has_root = is_integer | (x >= 0.0) | x.equals(-_INF) | x.is_nan()
    result = select(has_root, signed, _NAN)
    # 1 even for NaN: of an exponent 0, of 1, and of -1 to the infinite
    is_one = y.equals(0.0) | x.equals(1.0) | (size.equals(1.0) & absolute(y).equals(_INF))
    return select(is_one, 1.0, result)
