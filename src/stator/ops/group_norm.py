"""Group norm, forward and backward: rows are groups of channels of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import count_of, read_twice
from stator.ops.table import lowers
from stator.ops.variance import inverse_deviation, moments

aten = torch.ops.aten
_b = Body()


@dataclass(frozen=True, slots=True)
class Groups:
    """A tensor of samples and channels, its channels in groups of `length`."""

    x: Value
    count: int

    @property
    def length(self) -> Index:
        """Channels of a group."""
        return self.x.size[1] // self.count

    @property
    def rows(self) -> list[Index]:
        """Sizes of samples and groups."""
        return [self.x.size[0], Index.of(self.count)]

    @property
    def inner(self) -> list[Index]:
        """Sizes of what one group of a sample holds."""
        return [self.length, *self.x.size[2:]]

    def point(self, row: Point, place: Point) -> Point:
        """A point of the whole."""
        return (row[0], row[1] * self.length + place[0], *place[1:])

    def row(self, point: Point) -> Point:
        """The sample and group that a point belongs to."""
        return (point[0], point[1] // self.length)


@lowers(aten.native_group_norm.default)
def group_norm(
    t: Builder, result: tuple[Result, ...], x: Value, weight: Any, bias: Any, *rest: Any
) -> tuple[Value, Value, Value]:
    """(x - mean) / sqrt(var + eps) * weight + bias, the mean, and 1 / sqrt(var + eps)"""
    _, _, _, count, eps = rest
    x = read_twice(t, x)
    groups, kind = Groups(x, count), x.dtype.computed_in
    mean, spread = moments(
        t, groups.rows, groups.inner, lambda k, r: cast(x.load(groups.point(k, r)), kind)
    )
    rstd = inverse_deviation(t, spread, count_of(groups.inner, kind), eps)

    def load(point: Point) -> Expr:
        row, channel = groups.row(point), (point[1],)
        value = _b.mul(_b.sub(cast(x.load(point), kind), mean.load(row)), rstd.load(row))
        if weight is not None:
            value = _b.mul(value, cast(weight.load(channel), kind))
        return value if bias is None else _b.add(value, cast(bias.load(channel), kind))

    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, mean.load),
        Value(result[2].size, result[2].dtype, rstd.load),
    )


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    t: Builder, result: tuple[Result | None, ...], grad: Value, x: Value, *rest: Any
) -> tuple[Value | None, ...]:
    """With g = grad * weight and n = (x - mean) * rstd, averages taken over a group:

    rstd * (g - mean(g) - n * mean(g * n)), sum(grad * n) and sum(grad) of each channel
    """
    mean, rstd, weight, _, _, _, count, _ = rest
    grad, x = read_twice(t, grad), read_twice(t, x)
    back = _Backward(t, grad, x, Groups(x, count), mean, rstd)
    plain, along = back.sums()
    of_weight = of_bias = None
    if result[1] is not None:
        of_weight = back.over_samples(result[1], along)
    if result[2] is not None:
        of_bias = back.over_samples(result[2], plain)
    of_input = None if result[0] is None else back.of_input(result[0], weight, plain, along)
    return of_input, of_weight, of_bias


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the gradients are made from."""

    t: Builder
    grad: Value
    x: Value
    groups: Groups
    mean: Value
    rstd: Value

    @property
    def kind(self) -> DType:
        """The type that all is computed in."""
        return self.x.dtype.computed_in

    def normal(self, point: Point) -> Expr:
        """(x - mean) * rstd"""
        row = self.groups.row(point)
        apart = _b.sub(cast(self.x.load(point), self.kind), cast(self.mean.load(row), self.kind))
        return _b.mul(apart, cast(self.rstd.load(row), self.kind))

    def sums(self) -> tuple[Value, Value]:
        """sum(grad) and sum(grad * n) of each channel of each sample."""

        def read(kept: Point, reduced: Point) -> Expr:
            return cast(self.grad.load((*kept, *reduced)), self.kind)

        def product(kept: Point, reduced: Point) -> Expr:
            return _b.mul(read(kept, reduced), self.normal((*kept, *reduced)))

        outer, inner = self.x.size[:2], self.x.size[2:]
        return (
            self.t.reduce(Combine.SUM, outer, inner, read),
            self.t.reduce(Combine.SUM, outer, inner, product),
        )

    def over_samples(self, result: Result, value: Value) -> Value:
        """Sums of each channel, over the samples."""
        samples = [self.x.size[0]]
        total = self.t.reduce(
            Combine.SUM, [self.x.size[1]], samples, lambda c, s: value.load((*s, *c))
        )
        return Value(result.size, result.dtype, total.load)

    def averages(self, weight: Value | None, value: Value) -> Value:
        """Averages of weighted sums, for each group of each sample."""
        count = count_of(self.groups.inner, self.kind)

        def read(row: Point, place: Point) -> Expr:
            point = self.groups.point(row, place)
            loaded = value.load(point)
            if weight is None:
                return loaded
            return _b.mul(loaded, cast(weight.load(point[1:]), self.kind))

        total = self.t.reduce(Combine.SUM, self.groups.rows, [self.groups.length], read)
        return self.t.keep(Value(total.size, self.kind, lambda row: _b.div(total.load(row), count)))

    def of_input(self, result: Result, weight: Value | None, plain: Value, along: Value) -> Value:
        """rstd * (g - mean(g) - n * mean(g * n))"""
        shifts, slopes = self.averages(weight, plain), self.averages(weight, along)

        def load(point: Point) -> Expr:
            row = self.groups.row(point)
            value = cast(self.grad.load(point), self.kind)
            if weight is not None:
                value = _b.mul(value, cast(weight.load((point[1],)), self.kind))
            slope = _b.mul(self.normal(point), slopes.load(row))
            rest = _b.sub(_b.sub(value, shifts.load(row)), slope)
            return _b.mul(cast(self.rstd.load(row), self.kind), rest)

        return Value(result.size, result.dtype, load)
