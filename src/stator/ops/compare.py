"""Comparison, logic, bits and choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from stator.core.dtypes import TORCH_DTYPES, DType
from stator.loops.build import Body, Value, apply, const
from stator.loops.ir import Cast, Expr
from stator.loops.prims import Prim
from stator.loops.values import Builder, Point, Result
from stator.loops.values import Value as Tensor
from stator.ops.pointwise import both, require_number_of
from stator.ops.table import Exact, Promotion, Takes, lowers, pointwise

aten = torch.ops.aten
_b = Body()


def truth(b: Body, x: Expr) -> Expr:
    """x != 0"""
    if isinstance(x, Cast) and x.value.dtype is DType.BOOL:
        return x.value
    return x if x.dtype is DType.BOOL else b.ne(x, 0)


def _formula(prim: Prim) -> Callable[..., Expr]:
    return lambda b, *args: apply(prim, *args)


# ---------------------------------------------------------------------------------------------
# Comparison

COMPARISONS: Final = {
    aten.eq: Prim.EQ,
    aten.ne: Prim.NE,
    aten.lt: Prim.LT,
    aten.le: Prim.LE,
    aten.gt: Prim.GT,
    aten.ge: Prim.GE,
}

for _operator, _prim in COMPARISONS.items():
    pointwise(
        _operator.Tensor, _operator.Scalar, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE
    )(_formula(_prim))


@pointwise(aten.isnan.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def isnan(b: Body, x: Expr) -> Expr:
    """Whether it is no number"""
    return b.is_nan(x) if x.dtype.is_float else const(False, DType.BOOL)


@pointwise(aten.isinf.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def isinf(b: Body, x: Expr) -> Expr:
    """|x| == inf"""
    return b.eq(b.abs(x), math.inf) if x.dtype.is_float else const(False, DType.BOOL)


@pointwise(aten.isposinf.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def isposinf(b: Body, x: Expr) -> Expr:
    """x == inf"""
    return b.eq(x, math.inf) if x.dtype.is_float else const(False, DType.BOOL)


@pointwise(aten.isneginf.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def isneginf(b: Body, x: Expr) -> Expr:
    """x == -inf"""
    return b.eq(x, -math.inf) if x.dtype.is_float else const(False, DType.BOOL)


@pointwise(aten.isfinite.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def isfinite(b: Body, x: Expr) -> Expr:
    """|x| < inf, which NaN is not"""
    return b.lt(b.abs(x), math.inf) if x.dtype.is_float else const(True, DType.BOOL)


@pointwise(aten.signbit.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def signbit(b: Body, x: Expr) -> Expr:
    """Whether the sign is minus, of zeros and NaN too"""
    if x.dtype.is_float:
        return b.lt(b.copysign(1, x), 0)
    return b.lt(x, 0) if x.dtype.is_signed else const(False, DType.BOOL)


# ---------------------------------------------------------------------------------------------
# Logic and bits


@pointwise(aten.logical_and.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def logical_and(b: Body, x: Expr, y: Expr) -> Expr:
    """x != 0 and y != 0"""
    return b.and_(truth(b, x), truth(b, y))


@pointwise(aten.logical_or.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def logical_or(b: Body, x: Expr, y: Expr) -> Expr:
    """x != 0 or y != 0"""
    return b.or_(truth(b, x), truth(b, y))


@pointwise(aten.logical_xor.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def logical_xor(b: Body, x: Expr, y: Expr) -> Expr:
    """(x != 0) != (y != 0)"""
    return b.xor(truth(b, x), truth(b, y))


@pointwise(aten.logical_not.default, promotion=Promotion.INPUTS, exact=Exact.EVERYWHERE)
def logical_not(b: Body, x: Expr) -> Expr:
    """x == 0"""
    return b.not_(x) if x.dtype is DType.BOOL else b.eq(x, 0)


BITWISE: Final = {
    aten.bitwise_and: Prim.AND,
    aten.bitwise_or: Prim.OR,
    aten.bitwise_xor: Prim.XOR,
}

for _operator, _prim in BITWISE.items():
    pointwise(
        _operator.Tensor,
        _operator.Scalar,
        _operator.Scalar_Tensor,
        takes=Takes.BITS,
        exact=Exact.EVERYWHERE,
    )(_formula(_prim))


@pointwise(aten.bitwise_not.default, takes=Takes.BITS, exact=Exact.EVERYWHERE)
def bitwise_not(b: Body, x: Expr) -> Expr:
    """~x"""
    return b.not_(x)


@pointwise(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    exact=Exact.EVERYWHERE,
)
def left_shift(b: Body, x: Value, amount: Value) -> Expr:
    """x << amount; 0 where the amount is negative or no less than the width"""
    x, amount = _shift_arguments(b, x, amount)
    return b.where(_is_within(b, amount, x), b.shl(x, amount), 0)


@pointwise(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
    exact=Exact.EVERYWHERE,
)
def right_shift(b: Body, x: Value, amount: Value) -> Expr:
    """x >> amount; only the sign is left where the amount is negative or no less than the width"""
    x, amount = _shift_arguments(b, x, amount)
    if not x.dtype.is_signed:
        return b.where(_is_within(b, amount, x), b.shr(x, amount), 0)
    furthest = 8 * x.dtype.bytes - 1
    return b.shr(x, b.where(_is_within(b, amount, x), amount, furthest))


def _shift_arguments(b: Body, x: Value, amount: Value) -> tuple[Expr, Expr]:
    x, amount = both(b, x, amount)
    if x.dtype.is_float or x.dtype is DType.BOOL:
        raise NotImplementedError(f"a shift of {x.dtype!r}: a multiplication, not of bits")
    return x, amount


def _is_within(b: Body, amount: Expr, x: Expr) -> Expr:
    """Whether a shift by `amount` leaves bits of x."""
    is_small = b.lt(amount, 8 * x.dtype.bytes)
    return b.and_(b.ge(amount, 0), is_small) if x.dtype.is_signed else is_small


# ---------------------------------------------------------------------------------------------
# Choice.  The condition arrives in the type of the result, as every tensor does.


@pointwise(
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.where.Scalar,
    exact=Exact.EVERYWHERE,
)
def where(b: Body, condition: Expr, x: Value, y: Value) -> Expr:
    """x where the condition holds, else y"""
    require_number_of(condition, x, y)  # it has the type of the result
    chosen, other = b.as_expr(x, condition), b.as_expr(y, condition)
    return b.where(truth(b, condition), chosen, other)


@pointwise(aten.masked_fill.Scalar, aten.masked_fill.Tensor, exact=Exact.EVERYWHERE)
def masked_fill(b: Body, x: Expr, mask: Expr, value: Value) -> Expr:
    """The value where the mask holds, else x"""
    require_number_of(x, value)
    return b.where(truth(b, mask), value, x)


@pointwise(aten.heaviside.default, exact=Exact.EVERYWHERE)
def heaviside(b: Body, x: Expr, value: Expr) -> Expr:
    """0 below zero and for NaN, 1 above, the value at zero"""
    return b.where(b.eq(x, 0), value, b.cast(b.gt(x, 0), x.dtype))


LARGEST: Final = {
    ours: torch.finfo(theirs).max for theirs, ours in TORCH_DTYPES.items() if ours.is_float
}


@lowers(aten.nan_to_num.default, exact=Exact.EVERYWHERE)
def nan_to_num(
    t: Builder, result: Result, x: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Tensor:
    """x with NaN and infinities replaced; by 0 and the largest numbers unless told"""
    if not result.dtype.is_float:
        return x
    largest = LARGEST[result.dtype]
    upper = largest if posinf is None else posinf
    lower = -largest if neginf is None else neginf

    def load(point: Point) -> Expr:
        value = x.load(point)
        finite = _b.where(_b.eq(value, math.inf), upper, value)
        finite = _b.where(_b.eq(value, -math.inf), lower, finite)
        return _b.where(_b.is_nan(value), 0 if nan is None else nan, finite)

    return Tensor(result.size, result.dtype, load)
