"""Losses of two tensors of one size, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.ir import Expr
from stator.loops.values import Builder, Point, Result, Value, broadcast
from stator.ops.reduce import common_size, count_of, summed
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()

NONE: Final = 0  # the reductions' numbers in ATen
MEAN: Final = 1
SUM: Final = 2

LEAST_LOG: Final = -100.0  # below it, eager cuts logarithms of probabilities off
LEAST_VARIANCE: Final = 1e-12  # of a probability p: p * (1 - p)


def reduced_loss(t: Builder, result: Result, loss: Value, reduction: int) -> Value:
    """The loss of each element, or their sum or mean."""
    if reduction == NONE:
        return Value(result.size, result.dtype, loss.load)
    total = summed(t, [], loss.size, loss.dtype, lambda _, point: loss.load(point))
    count = count_of(loss.size, loss.dtype)

    def load(point: Point) -> Expr:
        return _b.div(total.load(()), count) if reduction == MEAN else total.load(())

    return Value(result.size, result.dtype, load)


def _forward(
    t: Builder,
    result: Result,
    values: tuple[Value | None, ...],
    reduction: int,
    formula: Callable[..., Expr],
) -> Value:
    """`formula` of corresponding elements, reduced; absent values are None for it too."""
    size, kind = common_size(*(v for v in values if v is not None)), result.dtype.computed_in
    wide = [None if v is None else broadcast(v, size) for v in values]

    def load(point: Point) -> Expr:
        return formula(*(None if v is None else cast(v.load(point), kind) for v in wide))

    return reduced_loss(t, result, Value(size, kind, load), reduction)


def _backward(
    result: Result,
    grad: Value,
    values: tuple[Value | None, ...],
    reduction: int,
    formula: Callable[..., Expr],
) -> Value:
    """grad * `formula` of corresponding elements, over their count for a mean."""
    kind = result.dtype.computed_in
    wide = [None if v is None else broadcast(v, result.size) for v in (grad, *values)]
    count = count_of(result.size, kind)

    def load(point: Point) -> Expr:
        given, *rest = (None if v is None else cast(v.load(point), kind) for v in wide)
        value = _b.mul(formula(*rest), given)
        return _b.div(value, count) if reduction == MEAN else value

    return Value(result.size, result.dtype, load)


def _filled(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, with defaults for those that were left out."""
    return given + defaults[len(given) :]


@lowers(aten.mse_loss.default)
def mse_loss(t: Builder, result: Result, x: Value, target: Value, reduction: int = MEAN) -> Value:
    """(x - target)**2"""
    return _forward(t, result, (x, target), reduction, lambda x, y: _b.square(_b.sub(x, y)))


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, reduction: int
) -> Value:
    """2 * (x - target) * grad"""
    return _backward(result, grad, (x, target), reduction, lambda x, y: _b.mul(_b.sub(x, y), 2))


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(
    t: Builder,
    result: Result,
    x: Value,
    target: Value,
    reduction: int = MEAN,
    beta: float = 1.0,
) -> Value:
    """With d = |x - target|: d**2 / (2 * beta) where d < beta, else d - beta / 2"""

    def formula(x: Expr, y: Expr) -> Expr:
        d = _b.abs(_b.sub(x, y))
        near = _b.div(_b.mul(_b.square(d), 0.5), beta)
        return _b.where(_b.lt(d, beta), near, _b.sub(d, 0.5 * beta))

    return _forward(t, result, (x, target), reduction, formula)


@lowers(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, *rest: Any
) -> Value:
    """With d = x - target: the sign of d where |d| >= beta, else d / beta; times grad"""
    reduction, beta = rest

    def formula(x: Expr, y: Expr) -> Expr:
        return _clipped(_b.sub(x, y), beta, lambda d: _b.div(d, beta), 1.0)

    return _backward(result, grad, (x, target), reduction, formula)


@lowers(aten.huber_loss.default)
def huber_loss(
    t: Builder,
    result: Result,
    x: Value,
    target: Value,
    reduction: int = MEAN,
    delta: float = 1.0,
) -> Value:
    """With d = |x - target|: d**2 / 2 where d <= delta, else delta * (d - delta / 2)"""

    def formula(x: Expr, y: Expr) -> Expr:
        d = _b.abs(_b.sub(x, y))
        far = _b.mul(_b.sub(d, 0.5 * delta), delta)
        return _b.where(_b.le(d, delta), _b.mul(_b.square(d), 0.5), far)

    return _forward(t, result, (x, target), reduction, formula)


@lowers(aten.huber_loss_backward.default)
def huber_loss_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, *rest: Any
) -> Value:
    """With d = x - target: delta with the sign of d where |d| >= delta, else d; times grad"""
    reduction, delta = rest

    def formula(x: Expr, y: Expr) -> Expr:
        return _clipped(_b.sub(x, y), delta, lambda d: d, delta)

    return _backward(result, grad, (x, target), reduction, formula)


def _clipped(d: Expr, bound: float, near: Callable[[Expr], Expr], far: float) -> Expr:
    """`near(d)` where |d| < bound, else `far` with the sign of d."""
    above = _b.where(_b.ge(d, bound), _b.const(far, d), near(d))
    return _b.where(_b.le(d, -bound), _b.const(-far, d), above)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(
    t: Builder, result: Result, x: Value, target: Value, reduction: int = MEAN
) -> Value:
    """log(1 + exp(-x * target))"""
    return _forward(
        t,
        result,
        (x, target),
        reduction,
        lambda x, y: _b.log1p(_b.exp(_b.mul(_b.neg(x), y))),
    )


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, reduction: int
) -> Value:
    """With z = exp(-x * target): -target * z / (z + 1) * grad"""

    def formula(x: Expr, y: Expr) -> Expr:
        z = _b.exp(_b.mul(_b.neg(x), y))
        return _b.div(_b.mul(_b.neg(y), z), _b.add(z, 1))

    return _backward(result, grad, (x, target), reduction, formula)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    t: Builder, result: Result, x: Value, target: Value, weight: Any = None, reduction: int = MEAN
) -> Value:
    """weight * ((target - 1) * log(1 - x) - target * log(x)), logarithms being at least -100"""
    _require_probabilities(t, x, "input")
    _require_probabilities(t, target, "target")

    def formula(x: Expr, y: Expr, w: Expr | None) -> Expr:
        of_one = _b.max(_b.log(x), LEAST_LOG)
        of_zero = _b.max(_b.log1p(_b.neg(x)), LEAST_LOG)
        value = _b.sub(_b.mul(_b.sub(y, 1), of_zero), _b.mul(y, of_one))
        return value if w is None else _b.mul(value, w)

    return _forward(t, result, (x, target, weight), reduction, formula)


def _require_probabilities(t: Builder, x: Value, name: str) -> None:
    """Raise what eager raises unless all of x is between 0 and 1."""

    def holds(point: Point) -> Expr:
        value = cast(x.load(point), x.dtype.computed_in)
        return _b.and_(_b.ge(value, 0), _b.le(value, 1))

    message = f"all elements of {name} should be between 0 and 1"
    t.require(Value(x.size, DType.BOOL, holds), RuntimeError, message)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, *rest: Any
) -> Value:
    """weight * (x - target) / max(x * (1 - x), 1e-12) * grad"""
    weight, reduction = _filled(rest, (None, MEAN))

    def formula(x: Expr, y: Expr, w: Expr | None) -> Expr:
        variance = _b.max(_b.mul(_b.sub(1, x), x), LEAST_VARIANCE)
        value = _b.div(_b.sub(x, y), variance)
        return value if w is None else _b.mul(value, w)

    return _backward(result, grad, (x, target, weight), reduction, formula)


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    t: Builder, result: Result, x: Value, target: Value, *rest: Any
) -> Value:
    """weight * ((1 - target) * x + (1 + (positive - 1) * target) * log(1 + exp(-x)))"""
    weight, positive, reduction = _filled(rest, (None, None, MEAN))

    def formula(x: Expr, y: Expr, w: Expr | None, p: Expr | None) -> Expr:
        # log(1 + exp(-x)), without an exponential that grows
        soft = _b.add(_b.log1p(_b.exp(_b.neg(_b.abs(x)))), _b.max(_b.neg(x), 0))
        if p is not None:
            soft = _b.mul(_b.add(_b.mul(_b.sub(p, 1), y), const(1, y.dtype)), soft)
        value = _b.add(_b.mul(_b.sub(1, y), x), soft)
        return value if w is None else _b.mul(value, w)

    return _forward(t, result, (x, target, weight, positive), reduction, formula)
