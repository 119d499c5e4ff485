"""Batch norm, forward and backward, in training and in evaluation.

Sums over a channel are taken in f64, as eager takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import count_of, join, read_twice
from stator.ops.table import lowers
from stator.ops.variance import inverse_deviation, moments_in_f64

aten = torch.ops.aten
_b = Body()


@dataclass(frozen=True, slots=True)
class Channels:
    """A tensor seen by its channels, dimension 1."""

    x: Value

    @property
    def inner(self) -> list[Index]:
        """Sizes of all dimensions but the channels'."""
        return [n for d, n in enumerate(self.x.size) if d != 1]

    def point(self, channel: Point, rest: Point) -> Point:
        """A point of the whole."""
        return join(self.x.rank, [d for d in range(self.x.rank) if d != 1], channel, rest)

    def summed(self, t: Builder, body: Callable[[Point], Expr]) -> Value:
        """The sum of `body` over the points of each channel."""
        return t.reduce(
            Combine.SUM, [self.x.size[1]], self.inner, lambda c, r: body(self.point(c, r))
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and 1 / sqrt(var + eps) of each channel, in f64."""

    mean: Value
    rstd: Value

    def normalized(self, t: Builder, result: Result, x: Value, *parameters: Any) -> Value:
        """(x - mean) * rstd * weight + bias, as (x - center) * scale + offset"""
        weight, bias = parameters
        kind = x.dtype.computed_in
        factor = _scale(self.rstd, weight, DType.F64)

        def rest(channel: Point) -> Expr:
            # What rounding took off the center comes back here.
            lost = _b.sub(cast(center.load(channel), DType.F64), self.mean.load(channel))
            value = _b.mul(lost, factor.load(channel))
            if bias is not None:
                value = _b.add(value, cast(bias.load(channel), DType.F64))
            return cast(value, kind)

        size = self.mean.size
        center = t.keep(Value(size, kind, lambda c: cast(self.mean.load(c), kind)))
        scale = t.keep(_scale(self.rstd, weight, kind))
        offset = t.keep(Value(size, kind, rest))

        def load(point: Point) -> Expr:
            channel = (point[1],)
            apart = _b.sub(cast(x.load(point), kind), center.load(channel))
            return _b.add(_b.mul(apart, scale.load(channel)), offset.load(channel))

        return Value(result.size, result.dtype, load)


def _scale(rstd: Value, weight: Value | None, kind: DType) -> Value:
    """rstd * weight"""

    def load(channel: Point) -> Expr:
        value = rstd.load(channel)
        if weight is not None:
            value = _b.mul(value, cast(weight.load(channel), value.dtype))
        return cast(value, kind)

    return Value(rstd.size, kind, load)


def _stored(result: Result, value: Value) -> Value:
    """A number for each channel, in the result's type."""
    kind = result.dtype.computed_in
    return Value(result.size, result.dtype, lambda p: cast(value.load(p), kind))


def _measured(t: Builder, x: Value, eps: float) -> tuple[Statistics, Value]:
    """Statistics of x, and the sum of squared distances from the mean."""
    channels, kind = Channels(x), x.dtype.computed_in

    def read(channel: Point, rest: Point) -> Expr:
        return cast(x.load(channels.point(channel, rest)), kind)

    mean, spread = moments_in_f64(t, [x.size[1]], channels.inner, kind, read)
    rstd = inverse_deviation(t, spread, count_of(channels.inner, DType.F64), eps)
    return Statistics(mean, rstd), spread


def _running_rstd(variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps)"""

    def load(channel: Point) -> Expr:
        return _b.rsqrt(_b.add(cast(variance.load(channel), DType.F64), eps))

    return Value(variance.size, DType.F64, load)


@lowers(aten._native_batch_norm_legit.no_stats)
def without_running(
    t: Builder, result: tuple[Result, ...], x: Value, weight: Any, bias: Any, *rest: Any
) -> tuple[Value, ...] | None:
    """(x - mean) / sqrt(var + eps) * weight + bias, the mean, and 1 / sqrt(var + eps)"""
    training, _, eps = rest
    if not training:
        return None
    x = read_twice(t, x)
    found, _ = _measured(t, x, eps)
    return (
        found.normalized(t, result[0], x, weight, bias),
        _stored(result[1], found.mean),
        _stored(result[2], found.rstd),
    )


@lowers(aten._native_batch_norm_legit_functional.default)
def with_running(
    t: Builder, result: tuple[Result, ...], x: Value, weight: Any, bias: Any, *rest: Any
) -> tuple[Value | None, ...]:
    """As without, and the running mean and unbiased variance, moved towards the new ones."""
    old_mean, old_variance, training, momentum, eps = rest
    if not training:
        same = _stored(result[3], old_mean), _stored(result[4], old_variance)
        first = evaluated(t, result, x, weight, bias, old_mean, old_variance, momentum, eps)
        return (*first, *same)
    x = read_twice(t, x)
    found, spread = _measured(t, x, eps)
    degrees = _b.sub(count_of(Channels(x).inner, DType.F64), 1)
    variance = Value(spread.size, DType.F64, lambda c: _b.div(spread.load(c), degrees))
    return (
        found.normalized(t, result[0], x, weight, bias),
        _stored(result[1], found.mean),
        _stored(result[2], found.rstd),
        _stored(result[3], _moved(old_mean, found.mean, momentum)),
        _stored(result[4], _moved(old_variance, variance, momentum)),
    )


def _moved(old: Value, new: Value, momentum: float) -> Value:
    """momentum * new + (1 - momentum) * old"""

    def load(channel: Point) -> Expr:
        kept = _b.mul(cast(old.load(channel), DType.F64), 1 - momentum)
        return _b.add(_b.mul(new.load(channel), momentum), kept)

    return Value(new.size, DType.F64, load)


@lowers(aten._native_batch_norm_legit_no_training.default)
def evaluated(
    t: Builder, result: tuple[Result, ...], x: Value, weight: Any, bias: Any, *rest: Any
) -> tuple[Value | None, ...]:
    """(x - running mean) / sqrt(running variance + eps) * weight + bias; nothing is saved"""
    mean, variance, _, eps = rest
    kind = x.dtype.computed_in
    scale = t.keep(_scale(_running_rstd(variance, eps), weight, kind))

    def load(point: Point) -> Expr:
        channel = (point[1],)
        apart = _b.sub(cast(x.load(point), kind), cast(mean.load(channel), kind))
        value = _b.mul(apart, scale.load(channel))
        return value if bias is None else _b.add(value, cast(bias.load(channel), kind))

    return Value(result[0].size, result[0].dtype, load), None, None


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    t: Builder, result: tuple[Result | None, ...], grad: Value, x: Value, *rest: Any
) -> tuple[Value | None, ...]:
    """With d = x - mean, averages taken over a channel, and s = rstd * weight:

    s * (grad - mean(grad) - d * rstd**2 * mean(grad * d)), in evaluation s * grad;
    rstd * sum(grad * d); sum(grad)
    """
    weight, old_mean, old_variance, mean, rstd, training, eps, _ = rest
    if not training:
        mean, rstd = old_mean, t.keep(_running_rstd(old_variance, eps))
    back = _Backward(t, read_twice(t, grad), read_twice(t, x), mean, rstd)
    of_input = of_weight = of_bias = None
    if training or result[1] is not None or result[2] is not None:
        plain, along = back.sums()
        if result[1] is not None:
            of_weight = _stored(result[1], back.scaled(along))
        if result[2] is not None:
            of_bias = _stored(result[2], plain)
        if training and result[0] is not None:
            of_input = back.of_input(result[0], weight, back.correction(plain, along))
    if not training and result[0] is not None:
        of_input = back.of_input(result[0], weight, None)
    return of_input, of_weight, of_bias


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the gradients are made from; `mean` and `rstd` hold a number for each channel."""

    t: Builder
    grad: Value
    x: Value
    mean: Value
    rstd: Value

    def apart(self, point: Point, kind: DType) -> Expr:
        """x - mean"""
        mean = cast(self.mean.load((point[1],)), kind)
        return _b.sub(cast(self.x.load(point), kind), mean)

    def sums(self) -> tuple[Value, Value]:
        """sum(grad) and sum(grad * (x - mean)) of each channel."""

        def product(point: Point) -> Expr:
            return _b.mul(cast(self.grad.load(point), DType.F64), self.apart(point, DType.F64))

        channels = Channels(self.x)
        plain = channels.summed(self.t, lambda p: cast(self.grad.load(p), DType.F64))
        return plain, channels.summed(self.t, product)

    def scaled(self, along: Value) -> Value:
        """along * rstd"""

        def load(channel: Point) -> Expr:
            return _b.mul(along.load(channel), cast(self.rstd.load(channel), DType.F64))

        return Value(along.size, DType.F64, load)

    def correction(self, plain: Value, along: Value) -> Callable[[Point], Expr]:
        """mean(grad) + (x - mean) * rstd**2 * mean(grad * (x - mean)), as a function of a point"""
        count, kind = count_of(Channels(self.x).inner, DType.F64), self.x.dtype.computed_in

        def slope(channel: Point) -> Expr:
            average = _b.div(along.load(channel), count)
            return cast(_b.mul(average, _b.square(cast(self.rstd.load(channel), DType.F64))), kind)

        shifts = self.t.keep(
            Value(plain.size, kind, lambda c: cast(_b.div(plain.load(c), count), kind))
        )
        slopes = self.t.keep(Value(along.size, kind, slope))

        def load(point: Point) -> Expr:
            channel = (point[1],)
            return _b.add(
                shifts.load(channel), _b.mul(self.apart(point, kind), slopes.load(channel))
            )

        return load

    def of_input(
        self, result: Result, weight: Value | None, correction: Callable[[Point], Expr] | None
    ) -> Value:
        """rstd * weight * (grad - correction)"""
        kind = self.x.dtype.computed_in

        def load(point: Point) -> Expr:
            channel = (point[1],)
            value = cast(self.grad.load(point), kind)
            if correction is not None:
                value = _b.sub(value, correction(point))
            scale = cast(self.rstd.load(channel), kind)
            if weight is not None:
                scale = _b.mul(scale, cast(weight.load(channel), kind))
            return _b.mul(value, scale)

        return Value(result.size, result.dtype, load)
