"""Functions of probability and information."""

from __future__ import annotations

import math
from typing import Any

import torch

from stator.loops.build import Body, Value
from stator.loops.ir import Expr
from stator.ops.pointwise import both
from stator.ops.table import Takes, pointwise

aten = torch.ops.aten


@pointwise(aten.logit.default)
def logit(b: Body, x: Expr, eps: Any = None) -> Expr:
    """log(x / (1 - x)), with x kept between eps and 1 - eps"""
    if eps is not None:
        x = b.min(b.max(x, eps), 1 - eps)
    return b.log(b.div(x, b.sub(1, x)))


@pointwise(aten.logit_backward.default, takes=Takes.FLOATS)
def logit_backward(b: Body, grad: Expr, x: Expr, eps: Any = None) -> Expr:
    """grad / (x * (1 - x)); outside of the domain 0 if eps is given, else NaN"""
    slope = b.div(grad, b.mul(x, b.sub(1, x)))
    lower, outside = (0.0, math.nan) if eps is None else (eps, 0.0)
    is_inside = b.and_(b.ge(x, lower), b.le(x, 1 - lower))
    return b.where(is_inside, slope, outside)


@pointwise(aten.logaddexp.default)
def logaddexp(b: Body, x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y))"""
    distance = b.abs(b.sub(x, y))
    total = b.add(b.max(x, y), b.log1p(b.exp(b.neg(distance))))
    return b.where(_is_same_infinity(b, x, y), x, total)


@pointwise(aten.logaddexp2.default)
def logaddexp2(b: Body, x: Expr, y: Expr) -> Expr:
    """log2(2 ** x + 2 ** y)"""
    distance = b.abs(b.sub(x, y))
    total = b.fma(b.log1p(b.exp2(b.neg(distance))), 1 / math.log(2), b.max(x, y))
    return b.where(_is_same_infinity(b, x, y), x, total)


def _is_same_infinity(b: Body, x: Expr, y: Expr) -> Expr:
    """Whether x - y would be NaN though both are numbers."""
    return b.and_(b.eq(x, y), b.eq(b.abs(x), math.inf))


@pointwise(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(b: Body, x: Value, y: Value) -> Expr:
    """x * log(y); 0 where x is, unless y is NaN"""
    x, y = both(b, x, y)
    return _product_or_zero(b, x, y, b.log(y))


@pointwise(
    aten.special_xlog1py.default,
    aten.special_xlog1py.self_scalar,
    aten.special_xlog1py.other_scalar,
)
def xlog1py(b: Body, x: Value, y: Value) -> Expr:
    """x * log(1 + y); 0 where x is, unless y is NaN"""
    x, y = both(b, x, y)
    return _product_or_zero(b, x, y, b.log1p(y))


@pointwise(aten.special_entr.default)
def entr(b: Body, x: Expr) -> Expr:
    """-x * log(x); 0 at zero, -inf below"""
    above = b.mul(b.neg(x), b.log(x))
    edge = b.where(b.eq(x, 0), b.const(0, x), b.const(-math.inf, x))
    return b.where(b.le(x, 0), edge, above)


@pointwise(aten.sinc.default)
def sinc(b: Body, x: Expr) -> Expr:
    """sin(pi * x) / (pi * x); 1 at zero"""
    angle = b.mul(x, math.pi)
    return b.where(b.eq(x, 0), 1, b.div(b.sin(angle), angle))


def _product_or_zero(b: Body, x: Expr, y: Expr, log: Expr) -> Expr:
    is_zero = b.and_(b.eq(x, 0), b.eq(y, y))
    return b.where(is_zero, 0, b.mul(x, log))
