"""Activations and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from stator.loops.build import Body, Value, cast
from stator.loops.ir import Expr
from stator.loops.values import Builder, Point, Result, broadcast
from stator.loops.values import Value as Tensor
from stator.ops.pointwise import clamp, clamp_min, require_number_of
from stator.ops.table import Exact, Takes, lowers, pointwise

aten = torch.ops.aten
_b = Body()


def elementwise(result: Result, formula: Callable[..., Expr], *tensors: Tensor) -> Tensor:
    """The formula of corresponding elements, in the type of the result."""
    kind = result.dtype.computed_in
    wide = [broadcast(tensor, result.size) for tensor in tensors]

    def load(point: Point) -> Expr:
        return formula(*(cast(tensor.load(point), kind) for tensor in wide))

    return Tensor(result.size, result.dtype, load)


# ---------------------------------------------------------------------------------------------
# Made of straight lines


@pointwise(aten.relu.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def relu(b: Body, x: Expr) -> Expr:
    """max(x, 0)"""
    return clamp_min(b, x, 0)


@pointwise(aten.relu6.default, exact=Exact.EVERYWHERE)
def relu6(b: Body, x: Expr) -> Expr:
    """min(max(x, 0), 6)"""
    return clamp(b, x, 0, 6)


@pointwise(aten.leaky_relu.default, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def leaky_relu(b: Body, x: Expr, negative_slope: Any = 0.01) -> Expr:
    """x above zero, slope * x below"""
    return b.where(b.gt(x, 0), x, b.mul(x, negative_slope))


@pointwise(aten.leaky_relu_backward.default, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def leaky_relu_backward(
    b: Body, grad: Expr, x: Expr, negative_slope: Any, self_is_result: bool
) -> Expr:
    """grad above zero, slope * grad below; the result has the sign of the input"""
    return b.where(b.gt(x, 0), grad, b.mul(grad, negative_slope))


@pointwise(aten._prelu_kernel.default, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def prelu(b: Body, x: Expr, weight: Expr) -> Expr:
    """x above zero, weight * x below"""
    return b.where(b.gt(x, 0), x, b.mul(weight, x))


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(
    t: Builder, results: tuple[Result, Result], grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """grad above zero, weight * grad below; and for the weight, x * grad below"""
    return (
        elementwise(
            results[0], lambda g, x, w: _b.where(_b.gt(x, 0), g, _b.mul(w, g)), grad, x, weight
        ),
        elementwise(results[1], lambda g, x: _b.where(_b.gt(x, 0), 0, _b.mul(x, g)), grad, x),
    )


@pointwise(aten.threshold.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def threshold(b: Body, x: Expr, threshold: Any, value: Any) -> Expr:
    """x above the threshold, else the value"""
    require_number_of(x, threshold, value)
    return b.where(b.le(x, threshold), value, x)


@pointwise(aten.threshold_backward.default, takes=Takes.NUMBERS, exact=Exact.EVERYWHERE)
def threshold_backward(b: Body, grad: Expr, x: Expr, threshold: Any) -> Expr:
    """grad where x is above the threshold"""
    return b.where(b.le(x, threshold), 0, grad)


@pointwise(aten.hardtanh.default, exact=Exact.EVERYWHERE)
def hardtanh(b: Body, x: Expr, min_val: Any = -1, max_val: Any = 1) -> Expr:
    """min(max(x, lower), upper)"""
    return clamp(b, x, min_val, max_val)


@pointwise(aten.hardtanh_backward.default, takes=Takes.FLOATS)
def hardtanh_backward(b: Body, grad: Expr, x: Expr, min_val: Any, max_val: Any) -> Expr:
    """grad between the limits"""
    is_between = b.and_(b.gt(x, min_val), b.lt(x, max_val))
    return b.where(is_between, grad, 0)


@pointwise(aten.hardsigmoid.default, takes=Takes.FLOATS, exact=Exact.HALVES)
def hardsigmoid(b: Body, x: Expr) -> Expr:
    """min(max(x + 3, 0), 6) / 6"""
    return b.mul(relu6(b, b.add(x, 3)), 1 / 6)


@pointwise(aten.hardsigmoid_backward.default, takes=Takes.FLOATS)
def hardsigmoid_backward(b: Body, grad: Expr, x: Expr) -> Expr:
    """grad / 6 between -3 and 3"""
    is_steep = b.and_(b.gt(x, -3), b.lt(x, 3))
    return b.where(is_steep, b.mul(grad, 1 / 6), 0)


@pointwise(aten.hardswish.default, takes=Takes.FLOATS)
def hardswish(b: Body, x: Expr) -> Expr:
    """x * hardsigmoid(x)"""
    return b.mul(x, hardsigmoid(b, x))


@pointwise(aten.hardswish_backward.default, takes=Takes.FLOATS)
def hardswish_backward(b: Body, grad: Expr, x: Expr) -> Expr:
    """0 up to -3, grad * (x / 3 + 1/2) up to 3, then grad"""
    curved = b.mul(grad, b.mul(b.add(x, 1.5), 1 / 3))
    return b.where(b.ge(x, 3), grad, b.where(b.le(x, -3), 0, curved))


@pointwise(aten.hardshrink.default, takes=Takes.FLOATS, exact=Exact.WIDE)
def hardshrink(b: Body, x: Expr, lambd: Any = 0.5) -> Expr:
    """x outside of [-lambda, lambda], else 0"""
    is_between = b.and_(b.ge(x, -lambd), b.le(x, lambd))
    return b.where(is_between, 0, x)


@pointwise(aten.softshrink.default, takes=Takes.FLOATS)
def softshrink(b: Body, x: Expr, lambd: Any = 0.5) -> Expr:
    """x moved toward zero by lambda, up to zero"""
    below = b.where(b.lt(x, -lambd), b.add(x, lambd), b.mul(x, 0))  # NaN stays NaN
    return b.where(b.gt(x, lambd), b.sub(x, lambd), below)


@pointwise(aten.hardshrink_backward.default, aten.softshrink_backward.default, takes=Takes.FLOATS)
def shrink_backward(b: Body, grad: Expr, x: Expr, lambd: Any) -> Expr:
    """grad outside of [-lambda, lambda]"""
    is_outside = b.or_(b.gt(x, lambd), b.lt(x, -lambd))
    return b.where(is_outside, grad, 0)


# ---------------------------------------------------------------------------------------------
# Made of exponentials


@pointwise(aten.sigmoid.default, exact=Exact.HALVES)
def sigmoid(b: Body, x: Expr) -> Expr:
    """1 / (1 + exp(-x))"""
    return b.sigmoid(x)


@pointwise(aten.sigmoid_backward.default, takes=Takes.FLOATS, exact=Exact.WIDE)
def sigmoid_backward(b: Body, grad: Expr, y: Expr) -> Expr:
    """grad * (1 - y) * y"""
    return b.mul(b.mul(grad, b.sub(1, y)), y)


@pointwise(aten.tanh_backward.default, takes=Takes.FLOATS, exact=Exact.EVERYWHERE)
def tanh_backward(b: Body, grad: Expr, y: Expr) -> Expr:
    """grad * (1 - y * y)"""
    return b.mul(grad, b.fma(b.neg(y), y, 1))


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(t: Builder, results: tuple[Result, Result], x: Tensor) -> tuple[Tensor, Tensor]:
    """min(x, 0) - log(1 + e); and e = exp(-|x|), which the derivative is made of"""

    def decay(x: Expr) -> Expr:
        return _b.exp(_b.neg(_b.abs(x)))

    def log(x: Expr) -> Expr:
        return _b.sub(_b.min(x, 0), _b.log1p(decay(x)))

    return elementwise(results[0], log, x), elementwise(results[1], decay, x)


@pointwise(aten.log_sigmoid_backward.default, takes=Takes.FLOATS)
def log_sigmoid_backward(b: Body, grad: Expr, x: Expr, buffer: Expr) -> Expr:
    """grad * (1 - e / (1 + e)) below zero, grad * e / (1 + e) above, where e = exp(-|x|)"""
    part = b.div(buffer, b.add(1, buffer))
    return b.mul(grad, b.where(b.lt(x, 0), b.sub(1, part), part))


@pointwise(aten.silu.default, takes=Takes.FLOATS, exact=Exact.HALVES)
def silu(b: Body, x: Expr) -> Expr:
    """x * sigmoid(x)"""
    return b.div(x, b.add(1, b.exp(b.neg(x))))


@pointwise(aten.silu_backward.default, takes=Takes.FLOATS)
def silu_backward(b: Body, grad: Expr, x: Expr) -> Expr:
    """grad * sigmoid(x) * (1 + x * (1 - sigmoid(x)))"""
    s = b.sigmoid(x)
    return b.mul(b.mul(grad, s), b.fma(x, b.sub(1, s), 1))


@pointwise(aten.softplus.default, takes=Takes.FLOATS)
def softplus(b: Body, x: Expr, beta: Any = 1, threshold: Any = 20) -> Expr:
    """log(1 + exp(beta * x)) / beta, and x where beta * x is above the threshold"""
    scaled = x if beta == 1 else b.mul(x, beta)
    curved = b.log1p(b.exp(scaled))
    curved = curved if beta == 1 else b.div(curved, beta)
    return b.where(b.gt(scaled, threshold), x, curved)


@pointwise(aten.softplus_backward.default, takes=Takes.FLOATS)
def softplus_backward(b: Body, grad: Expr, x: Expr, beta: Any, threshold: Any) -> Expr:
    """grad * sigmoid(beta * x), and grad where beta * x is above the threshold"""
    scaled = x if beta == 1 else b.mul(x, beta)
    e = b.exp(scaled)
    slope = b.div(e, b.add(e, 1))  # unlike 1 / (1 + 1 / e), it keeps the smallest slopes
    return b.where(b.gt(scaled, threshold), grad, b.mul(grad, slope))


@pointwise(aten.elu.default, takes=Takes.FLOATS)
def elu(b: Body, x: Expr, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Expr:
    """scale * x above zero, scale * alpha * (exp(input_scale * x) - 1) below"""
    below = b.mul(b.expm1(b.mul(x, input_scale)), alpha * scale)
    return b.where(b.lt(x, 0), below, b.mul(x, scale))


@pointwise(aten.elu_backward.default, takes=Takes.FLOATS)
def elu_backward(b: Body, grad: Expr, *settings: Any) -> Expr:
    """grad * scale above zero; below, times the slope, which the result tells as well"""
    alpha, scale, input_scale, is_result, x = settings
    if is_result and alpha < 0:
        raise NotImplementedError("a result of a negative slope does not tell: eager raises")
    if is_result:
        below = b.mul(grad, b.mul(b.add(x, alpha * scale), input_scale))
    else:
        decayed = b.mul(grad, b.exp(b.mul(x, input_scale)))
        below = b.mul(decayed, input_scale * alpha * scale)
    return b.where(b.gt(x, 0), b.mul(grad, scale), below)


@pointwise(aten.celu.default, takes=Takes.FLOATS)
def celu(b: Body, x: Expr, alpha: Any = 1.0) -> Expr:
    """x above zero, alpha * (exp(x / alpha) - 1) below"""
    return elu(b, x, alpha, 1, 1 / alpha)


SELU_ALPHA: Final = 1.6732632423543772848170429916717
SELU_SCALE: Final = 1.0507009873554804934193349852946


@pointwise(aten.selu.default, takes=Takes.FLOATS)
def selu(b: Body, x: Expr) -> Expr:
    """elu with the two constants that keep mean and variance"""
    return elu(b, x, SELU_ALPHA, SELU_SCALE)


# ---------------------------------------------------------------------------------------------
# mish(x) = x * tanh(softplus(x)).  With n = e * (e + 2), e = exp(x), that is x * n / (n + 2): one
# exponential and no logarithm.  Above 40 the fraction is 1 in f64 too, and e * e has no overflow.

MISH_IS_LINEAR: Final = 40


@pointwise(aten.mish.default, takes=Takes.FLOATS)
def mish(b: Body, x: Expr) -> Expr:
    """x * tanh(log(1 + exp(x)))"""
    n = _mish_ratio(b, b.min(x, MISH_IS_LINEAR))
    return b.mul(x, b.div(n, b.add(n, 2)))


@pointwise(aten.mish_backward.default, takes=Takes.FLOATS)
def mish_backward(b: Body, grad: Expr, x: Expr) -> Expr:
    """grad * (t + x * sigmoid(x) * (1 - t * t)) where t = tanh(log(1 + exp(x)))"""
    x = b.min(x, MISH_IS_LINEAR)
    n = _mish_ratio(b, x)
    t = b.div(n, b.add(n, 2))
    rest = b.mul(b.div(2, b.add(n, 2)), b.add(1, t))  # 1 - t * t without cancellation
    return b.mul(grad, b.fma(b.mul(x, b.sigmoid(x)), rest, t))


def _mish_ratio(b: Body, x: Expr) -> Expr:
    e = b.exp(x)
    return b.mul(e, b.add(e, 2))


# ---------------------------------------------------------------------------------------------
# gelu(x) = x * Phi(x), where Phi is the normal distribution, and its approximation by tanh

GELU_SLOPE: Final = math.sqrt(2 / math.pi)
GELU_CUBE: Final = 0.044715


@pointwise(aten.gelu.default, takes=Takes.FLOATS)
def gelu(b: Body, x: Expr, *, approximate: str = "none") -> Expr:
    """x * Phi(x)"""
    return b.mul(x, _phi(b, x, approximate))


@pointwise(aten.gelu_backward.default, takes=Takes.FLOATS)
def gelu_backward(b: Body, grad: Expr, x: Expr, *, approximate: str = "none") -> Expr:
    """grad * (Phi(x) + x * Phi'(x))"""
    if approximate == "tanh":
        inner = b.add(b.mul(b.square(x), 3 * GELU_CUBE * GELU_SLOPE), GELU_SLOPE)
        density = b.mul(b.mul(b.sub(1, b.square(_gelu_tanh(b, x))), inner), 0.5)
    else:
        density = b.mul(b.exp(b.mul(b.square(x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.mul(grad, b.fma(x, density, _phi(b, x, approximate)))


def _phi(b: Body, x: Expr, approximate: str) -> Expr:
    """Phi(x)"""
    if approximate == "tanh":
        return b.fma(_gelu_tanh(b, x), 0.5, 0.5)
    return b.normal_cdf(x)


def _gelu_tanh(b: Body, x: Expr) -> Expr:
    """2 * Phi(x) - 1, nearly"""
    cube = b.mul(b.square(x), x)
    return b.tanh(b.mul(b.add(x, b.mul(cube, GELU_CUBE)), GELU_SLOPE))


@pointwise(aten.native_dropout_backward.default, exact=Exact.EVERYWHERE)
def dropout_backward(b: Body, grad: Expr, mask: Value, scale: Any) -> Expr:
    """grad * mask * scale"""
    return b.mul(grad, b.mul(mask, scale))
