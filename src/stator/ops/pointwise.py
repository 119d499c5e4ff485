"""Arithmetic, powers, rounding, limits and elementary functions: the formula is the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeGuard

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, Value, apply
from stator.loops.ir import Const, Expr
from stator.loops.prims import Prim
from stator.ops.table import Exact, Promotion, Takes, pointwise

aten = torch.ops.aten


def both(b: Body, x: Value, y: Value) -> tuple[Expr, Expr]:
    """Both arguments as expressions; one of them may be a number."""
    if isinstance(x, Expr):
        return x, b.as_expr(y, x)
    assert isinstance(y, Expr), "an operator on numbers alone"
    return b.as_expr(x, y), y


def require_number_of(x: Expr, *numbers: Value | None) -> None:
    """Refuse numbers that eager does not turn into an integer of x's type."""
    if x.dtype.is_float or x.dtype is DType.BOOL:
        return
    highest = (1 << (8 * x.dtype.bytes - x.dtype.is_signed)) - 1
    for number in numbers:
        if number is None or isinstance(number, Expr):
            continue
        lowest = 0 if isinstance(number, float) else -highest  # a negative integer may wrap
        if not (-highest - 1 if x.dtype.is_signed else lowest) <= number <= highest:
            raise NotImplementedError(f"{number} as a {x.dtype!r}: eager raises")


def _require_no_bool(number: Value) -> None:
    if isinstance(number, bool):
        raise NotImplementedError("a bool in a subtraction: eager raises")


def _require_whole(x: Expr, alpha: Any) -> None:
    """Refuse a factor that integers are not multiplied by: eager raises."""
    if isinstance(alpha, float) and not x.dtype.is_float:
        raise NotImplementedError("integers times a float: eager raises")


# ---------------------------------------------------------------------------------------------
# Where kernels have eager's bits: as measured, of half precision over all of its numbers.

EXACT_POWERS: Final = (0, 1, 2, -1)


def sum_is_exact(dtypes: Sequence[DType], x: Any, y: Any, alpha: Any = 1) -> bool:
    """Half precision: eager rounds its numbers and its products with alpha."""
    numbers = [one for one in (x, y) if isinstance(one, int | float)]
    if not any(dtype.is_float for dtype in dtypes):
        return True
    if alpha != 1:
        return Exact.WIDE.holds(dtypes) and not numbers
    halves = [dtype for dtype in dtypes if dtype.computed_in is not dtype]
    return all(_is_whole_in(number, half) for number in numbers for half in halves)


def _is_whole_in(number: float, half: DType) -> bool:
    """Whether half precision has the very number."""
    kind = torch.bfloat16 if half is DType.BF16 else torch.float16
    return bool(torch.tensor(number, dtype=kind).item() == number)


def power_is_exact(dtypes: Sequence[DType], x: Any, exponent: Any) -> bool:
    """Powers that are products or quotients."""
    if not isinstance(exponent, int | float):
        return False
    return exponent in EXACT_POWERS or not any(dtype.is_float for dtype in dtypes)


# ---------------------------------------------------------------------------------------------
# Sums and products.  Of bools, a sum is `or` and a product is `and`.


@pointwise(aten.add.Tensor, aten.add.Scalar, exact=sum_is_exact)
def add(b: Body, x: Expr, y: Value, alpha: Any = 1) -> Expr:
    """x + alpha * y"""
    _require_whole(x, alpha)
    if x.dtype is DType.BOOL:
        return b.or_(x, y) if alpha else x
    return b.add(x, y) if alpha == 1 else _multiply_add(b, b.as_expr(y, x), alpha, x)


@pointwise(aten.sub.Tensor, aten.sub.Scalar, takes=Takes.NUMBERS, exact=sum_is_exact)
def sub(b: Body, x: Expr, y: Value, alpha: Any = 1) -> Expr:
    """x - alpha * y"""
    _require_no_bool(y)
    _require_whole(x, alpha)
    return b.sub(x, y) if alpha == 1 else _multiply_add(b, b.as_expr(y, x), -alpha, x)


@pointwise(aten.rsub.Tensor, aten.rsub.Scalar, takes=Takes.NUMBERS, exact=sum_is_exact)
def rsub(b: Body, x: Expr, y: Value, alpha: Any = 1) -> Expr:
    """y - alpha * x"""
    _require_no_bool(y)
    _require_whole(x, alpha)
    return b.sub(y, x) if alpha == 1 else _multiply_add(b, x, -alpha, y)


@pointwise(aten.mul.Tensor, aten.mul.Scalar, exact=Exact.EVERYWHERE)
def mul(b: Body, x: Expr, y: Value) -> Expr:
    """x * y"""
    return b.and_(x, y) if x.dtype is DType.BOOL else b.mul(x, y)


@pointwise(aten.addcmul.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def addcmul(b: Body, x: Expr, y: Expr, z: Expr, *, value: Any = 1) -> Expr:
    """x + value * y * z"""
    require_number_of(x, value)
    return _multiply_add(b, y if value == 1 else b.mul(y, value), z, x)


@pointwise(aten.addcdiv.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def addcdiv(b: Body, x: Expr, y: Expr, z: Expr, *, value: Any = 1) -> Expr:
    """x + value * y / z"""
    return b.add(x, b.div(y if value == 1 else b.mul(y, value), z))


@pointwise(aten.lerp.Scalar, aten.lerp.Tensor, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def lerp(b: Body, x: Expr, end: Expr, weight: Value) -> Expr:
    """x + weight * (end - x), counted from the nearer end, so that both ends are met exactly"""
    distance = b.sub(end, x)
    if not isinstance(weight, Expr):
        if abs(weight) < 0.5:
            return b.fma(distance, weight, x)
        return b.fma(distance, weight - 1, end)
    is_near = b.lt(b.abs(weight), 0.5)
    factor = b.where(is_near, weight, b.sub(weight, 1))
    return b.fma(distance, factor, b.where(is_near, x, end))


def _multiply_add(b: Body, x: Expr, y: Value, z: Value) -> Expr:
    """x * y + z: floats are rounded once, as eager rounds them."""
    return b.fma(x, y, z) if x.dtype.is_float else b.add(b.mul(x, y), z)


# ---------------------------------------------------------------------------------------------
# Division.  Eager raises where an integer is divided by zero, which loops cannot: integers are
# divided by constants alone, and other divisions stay calls of the operator.  Remainders jump:
# in half precision they are those of the rounded number, as eager's.


@pointwise(aten.div.Tensor, aten.div.Scalar, exact=Exact.EVERYWHERE)
def div(b: Body, x: Expr, y: Value) -> Expr:
    """x / y"""
    return b.mul(x, 1 / y) if _is_power_of_two(y) else b.div(x, y)


@pointwise(aten.div.Tensor_mode, aten.div.Scalar_mode, takes=Takes.NUMBERS, exact=Exact.WIDE)
def div_mode(b: Body, x: Expr, y: Value, *, rounding_mode: str | None) -> Expr:
    """x / y, rounded as asked"""
    if rounding_mode is None:
        return div(b, x, y)
    if rounding_mode == "floor":
        return floor_divide(b, x, y)
    if x.dtype.is_float:
        return b.trunc(div(b, x, y))
    by = _constant_divisor(x, y)
    return b.neg(x) if by == -1 else b.div(x, by)


@pointwise(aten.floor_divide.default, aten.floor_divide.Scalar, exact=Exact.WIDE)
def floor_divide(b: Body, x: Expr, y: Value) -> Expr:
    """floor(x / y), as Python's //"""
    if x.dtype.is_float:
        return _float_floor_divide(b, x, b.as_expr(y, x))
    by = _constant_divisor(x, y)
    if by == -1:  # the processor's division traps on the lowest integer
        return b.neg(x)
    quotient = b.div(x, by)
    if not x.dtype.is_signed:
        return quotient
    is_above = _has_other_sign(b, b.mod(x, by), by)
    return b.where(is_above, b.sub(quotient, 1), quotient)


@pointwise(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    promotion=Promotion.ROUNDED,
    takes=Takes.NUMBERS,
    exact=Exact.INTEGERS,
)
def remainder(b: Body, x: Value, y: Value) -> Expr:
    """x - y * floor(x / y): the sign of the divisor, as Python's %"""
    x, y = both(b, x, y)
    if x.dtype.is_float:
        return _float_remainder(b, x, y)
    by = _constant_divisor(x, y)
    if by == -1:
        return b.const(0, x)
    rest = b.mod(x, by)
    return b.where(_has_other_sign(b, rest, by), b.add(rest, by), rest)


@pointwise(
    aten.fmod.Tensor,
    aten.fmod.Scalar,
    promotion=Promotion.ROUNDED,
    takes=Takes.NUMBERS,
    exact=Exact.INTEGERS,
)
def fmod(b: Body, x: Expr, y: Value) -> Expr:
    """x - y * trunc(x / y): the sign of the dividend, as C's"""
    if x.dtype.is_float:
        return b.mod(x, y)
    by = _constant_divisor(x, y)
    return b.const(0, x) if by == -1 else b.mod(x, by)


@pointwise(aten.reciprocal.default, exact=Exact.EVERYWHERE)
def reciprocal(b: Body, x: Expr) -> Expr:
    """1 / x"""
    return b.reciprocal(x)


def _is_power_of_two(y: Value) -> TypeGuard[float]:
    """Whether multiplying by 1 / y gives the same as dividing by y."""
    if isinstance(y, Expr) or not math.isfinite(y):
        return False
    fraction, exponent = math.frexp(y)
    return abs(fraction) == 0.5 and abs(exponent) < 100


def _float_floor_divide(b: Body, x: Expr, y: Expr) -> Expr:
    """floor(x / y) for floats: exact, since the remainder is taken off before dividing"""
    rest = b.mod(x, y)
    steps = b.div(b.sub(x, rest), y)
    steps = b.where(_rest_is_off(b, rest, y), b.sub(steps, 1), steps)
    floor = b.floor(steps)
    whole = b.where(b.gt(b.sub(steps, floor), 0.5), b.add(floor, 1), floor)
    ratio = b.div(x, y)
    zero = b.copysign(b.const(0, x), ratio)
    return b.where(b.eq(y, 0), ratio, b.where(b.eq(steps, 0), zero, whole))


def _float_remainder(b: Body, x: Expr, y: Expr) -> Expr:
    rest = b.mod(x, y)
    return b.where(_rest_is_off(b, rest, y), b.add(rest, y), rest)


def _rest_is_off(b: Body, rest: Expr, y: Expr) -> Expr:
    """Whether the remainder has another sign than the divisor."""
    return b.and_(b.ne(rest, 0), b.xor(b.lt(rest, 0), b.lt(y, 0)))


def _has_other_sign(b: Body, rest: Expr, by: int) -> Expr:
    """Whether an integer remainder has another sign than the constant divisor."""
    return b.lt(rest, 0) if by > 0 else b.gt(rest, 0)


def _constant_divisor(x: Expr, y: Value) -> int:
    """What integers of x's type are divided by."""
    value = y.value if isinstance(y, Const) else y
    if not isinstance(value, int):
        raise NotImplementedError("integers divided by a tensor: eager raises on zero")
    bits = 8 * x.dtype.bytes
    by = int(value) & (1 << bits) - 1
    if x.dtype.is_signed and by >> bits - 1:
        by -= 1 << bits
    if by == 0:
        raise NotImplementedError("integers divided by zero: eager raises")
    return by


# ---------------------------------------------------------------------------------------------
# Powers

# The exponents for which eager takes a shorter way, with the same results at zeros and infinities.
POWERS: Final[dict[float, Callable[[Body, Expr], Expr]]] = {
    0: lambda b, x: b.const(1, x),
    1: lambda b, x: x,
    2: lambda b, x: b.square(x),
    3: lambda b, x: b.mul(b.square(x), x),
    0.5: lambda b, x: b.sqrt(x),
    -0.5: lambda b, x: b.rsqrt(x),
    -1: lambda b, x: b.reciprocal(x),
    -2: lambda b, x: b.reciprocal(b.square(x)),
}


@pointwise(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, exact=power_is_exact)
def pow(b: Body, x: Expr, exponent: Value) -> Expr:
    """x ** exponent"""
    if not x.dtype.is_float:
        return _integer_power(b, x, exponent)
    if isinstance(exponent, Expr) or exponent not in POWERS:
        return b.pow(x, exponent)
    return POWERS[exponent](b, x)


@pointwise(aten.pow.Scalar)
def pow_of_number(b: Body, base: Any, exponent: Expr) -> Expr:
    """base ** exponent"""
    if base == 1:
        return b.const(1, exponent)
    if not exponent.dtype.is_float:
        raise NotImplementedError("an integer to the power of a tensor")
    return b.exp2(exponent) if base == 2 else b.pow(base, exponent)


@pointwise(aten.square.default, exact=Exact.EVERYWHERE)
def square(b: Body, x: Expr) -> Expr:
    """x * x"""
    return b.square(x)


@pointwise(aten.rsqrt.default, exact=Exact.WIDE)
def rsqrt(b: Body, x: Expr) -> Expr:
    """1 / sqrt(x)"""
    return b.rsqrt(x)


def _integer_power(b: Body, x: Expr, exponent: Value) -> Expr:
    """x ** exponent by repeated squaring, wrapping as integers do."""
    if isinstance(exponent, Expr) or exponent < 0:
        raise NotImplementedError("an integer to a power that is no natural constant")
    left, power, result = int(exponent), x, None
    while left:
        if left & 1:
            result = power if result is None else b.mul(result, power)
        left >>= 1
        if left:
            power = b.square(power)
    return b.const(1, x) if result is None else result


# ---------------------------------------------------------------------------------------------
# Signs and rounding


@pointwise(aten.neg.default, exact=Exact.EVERYWHERE)
def neg(b: Body, x: Expr) -> Expr:
    """-x"""
    return b.neg(x)


@pointwise(aten.abs.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def abs_(b: Body, x: Expr) -> Expr:
    """|x|"""
    return b.abs(x) if x.dtype.is_signed else x


@pointwise(aten.sign.default, aten.sgn.default, exact=Exact.EVERYWHERE)
def sign(b: Body, x: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN"""
    if x.dtype is DType.BOOL:
        return x
    positive = b.cast(b.gt(x, 0), x.dtype)
    return b.sub(positive, b.cast(b.lt(x, 0), x.dtype)) if x.dtype.is_signed else positive


@pointwise(aten.angle.default, exact=Exact.EVERYWHERE)
def angle(b: Body, x: Expr) -> Expr:
    """pi below zero, 0 above; NaN stays NaN"""
    return b.where(b.is_nan(x), x, b.where(b.lt(x, 0), b.const(math.pi, x), 0))


@pointwise(aten.copysign.Tensor, aten.copysign.Scalar, exact=Exact.EVERYWHERE)
def copysign(b: Body, x: Expr, y: Value) -> Expr:
    """|x| with the sign of y"""
    return b.copysign(x, y)


def _rounding(prim: Prim) -> Callable[[Body, Expr], Expr]:
    """A formula that leaves integers alone."""
    return lambda b, x: apply(prim, x) if x.dtype.is_float else x


pointwise(aten.floor.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)(_rounding(Prim.FLOOR))
pointwise(aten.ceil.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)(_rounding(Prim.CEIL))
pointwise(aten.trunc.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)(_rounding(Prim.TRUNC))
pointwise(aten.round.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)(_rounding(Prim.ROUND))


@pointwise(aten.round.decimals, takes=Takes.FLOATS)
def round_decimals(b: Body, x: Expr, *, decimals: int = 0) -> Expr:
    """x rounded to so many digits after the point, half to even"""
    if not x.dtype.is_float:
        return x
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return b.mul(b.round(b.div(x, scale)), scale)
    return b.div(b.round(b.mul(x, scale)), scale) if decimals else b.round(x)


@pointwise(aten.frac.default, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def frac(b: Body, x: Expr) -> Expr:
    """x - trunc(x)"""
    return b.sub(x, b.trunc(x))


# ---------------------------------------------------------------------------------------------
# Limits: NaN wins, except in fmax and fmin, which look for a number.


@pointwise(aten.maximum.default, exact=Exact.EVERYWHERE)
def maximum(b: Body, x: Expr, y: Expr) -> Expr:
    """The larger one"""
    return b.or_(x, y) if x.dtype is DType.BOOL else b.max(x, y)


@pointwise(aten.minimum.default, exact=Exact.EVERYWHERE)
def minimum(b: Body, x: Expr, y: Expr) -> Expr:
    """The smaller one"""
    return b.and_(x, y) if x.dtype is DType.BOOL else b.min(x, y)


@pointwise(aten.fmax.default, exact=Exact.EVERYWHERE)
def fmax(b: Body, x: Expr, y: Expr) -> Expr:
    """The larger one; of a number and NaN, the number"""
    if not x.dtype.is_float:
        return maximum(b, x, y)
    return b.where(b.or_(b.ge(x, y), b.is_nan(y)), x, y)


@pointwise(aten.fmin.default, exact=Exact.EVERYWHERE)
def fmin(b: Body, x: Expr, y: Expr) -> Expr:
    """The smaller one; of a number and NaN, the number"""
    if not x.dtype.is_float:
        return minimum(b, x, y)
    return b.where(b.or_(b.le(x, y), b.is_nan(y)), x, y)


@pointwise(aten.clamp.default, aten.clamp.Tensor, exact=Exact.EVERYWHERE)
def clamp(b: Body, x: Expr, min: Value | None = None, max: Value | None = None) -> Expr:
    """min(max(x, lower), upper)"""
    if x.dtype is DType.BOOL and None not in (min, max):
        raise NotImplementedError("bools between two limits: eager raises")
    if min is not None:
        x = clamp_min(b, x, min)
    return x if max is None else clamp_max(b, x, max)


@pointwise(aten.clamp_min.default, aten.clamp_min.Tensor, exact=Exact.EVERYWHERE)
def clamp_min(b: Body, x: Expr, min: Value) -> Expr:
    """max(x, lower)"""
    if isinstance(min, Expr) or min != min:
        return b.max(x, min)
    return b.where(b.lt(x, min), min, x)  # keeps NaN and the sign of zero, as eager does


@pointwise(aten.clamp_max.default, aten.clamp_max.Tensor, exact=Exact.EVERYWHERE)
def clamp_max(b: Body, x: Expr, max: Value) -> Expr:
    """min(x, upper)"""
    if isinstance(max, Expr) or max != max:
        return b.min(x, max)
    return b.where(b.gt(x, max), max, x)


# ---------------------------------------------------------------------------------------------
# Elementary functions that are primitives

ELEMENTARY: Final = {
    aten.sqrt.default: Prim.SQRT,
    aten.exp.default: Prim.EXP,
    aten.exp2.default: Prim.EXP2,
    aten.expm1.default: Prim.EXPM1,
    aten.log.default: Prim.LOG,
    aten.log2.default: Prim.LOG2,
    aten.log10.default: Prim.LOG10,
    aten.log1p.default: Prim.LOG1P,
    aten.sin.default: Prim.SIN,
    aten.cos.default: Prim.COS,
    aten.tan.default: Prim.TAN,
    aten.asin.default: Prim.ASIN,
    aten.acos.default: Prim.ACOS,
    aten.atan.default: Prim.ATAN,
    aten.atan2.default: Prim.ATAN2,
    aten.sinh.default: Prim.SINH,
    aten.cosh.default: Prim.COSH,
    aten.tanh.default: Prim.TANH,
    aten.asinh.default: Prim.ASINH,
    aten.acosh.default: Prim.ACOSH,
    aten.atanh.default: Prim.ATANH,
    aten.erf.default: Prim.ERF,
    aten.erfc.default: Prim.ERFC,
    aten.hypot.default: Prim.HYPOT,
}


def _elementary(prim: Prim) -> Callable[..., Expr]:
    return lambda b, *args: apply(prim, *args)


# Of these every single number of half precision has eager's result.
IN_HALVES: Final = frozenset(
    {Prim.SQRT, Prim.EXP, Prim.EXP2, Prim.EXPM1, Prim.LOG2, Prim.LOG10, Prim.LOG1P, Prim.COS}
    | {Prim.TAN, Prim.ACOS, Prim.TANH, Prim.ACOSH, Prim.ATANH, Prim.ERFC}
)
IN_BF16: Final = frozenset({Prim.LOG, Prim.SIN, Prim.ASIN, Prim.ATAN, Prim.ASINH})

for _target, _prim in ELEMENTARY.items():
    _takes = Takes.FLOATS if _prim is Prim.HYPOT else Takes.ANYTHING
    _exact = Exact.BF16 if _prim in IN_BF16 else Exact.NOWHERE
    _exact = Exact.HALVES if _prim in IN_HALVES else _exact
    pointwise(_target, takes=_takes, exact=_exact)(_elementary(_prim))


@pointwise(aten.deg2rad.default, exact=Exact.EVERYWHERE)
def deg2rad(b: Body, x: Expr) -> Expr:
    """x * pi / 180"""
    return b.mul(x, math.pi / 180)


@pointwise(aten.rad2deg.default, exact=Exact.EVERYWHERE)
def rad2deg(b: Body, x: Expr) -> Expr:
    """x * 180 / pi"""
    return b.mul(x, 180 / math.pi)
