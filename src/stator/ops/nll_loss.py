"""Negative log likelihood of a class for each place, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Element, Index
from stator.loops.ir import Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.loss import MEAN, NONE
from stator.ops.reduce import count_of, summed
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


@dataclass(frozen=True, slots=True)
class Labels:
    """Which class each place of `x` is said to have."""

    x: Value
    target: Value
    weight: Value | None
    ignored: int

    @property
    def dim(self) -> int:
        """The dimension of the classes: the second, or the only one."""
        return min(self.x.rank - 1, 1)

    @property
    def classes(self) -> Index:
        """How many there are."""
        return self.x.size[self.dim]

    def label(self, place: Point) -> Expr:
        """The class of a place, as the target says it."""
        return cast(self.target.load(place), DType.I64)

    def counts(self, place: Point) -> Expr:
        """Whether a place is not ignored."""
        return _b.ne(self.label(place), self.ignored)

    def chosen(self, place: Point) -> Index:
        """The class of a place, as an index that lies within bounds whatever the target says."""
        return Index.of(Element(self.label(place))) % self.classes

    def weight_of(self, place: Point, kind: DType) -> Expr:
        """The weight of the class of a place; 0 if it is ignored."""
        one = const(1, kind)
        weight = one if self.weight is None else self.weight.load((self.chosen(place),))
        return _b.where(self.counts(place), cast(weight, kind), const(0, kind))

    def loss_of(self, place: Point, kind: DType) -> Expr:
        """-weight * x of the class of a place; 0 if it is ignored."""
        point = (*place[: self.dim], self.chosen(place), *place[self.dim :])
        value = _b.neg(cast(self.x.load(point), kind))
        if self.weight is not None:
            value = _b.mul(value, cast(self.weight.load((self.chosen(place),)), kind))
        return _b.where(self.counts(place), value, const(0, kind))

    def require(self, t: Builder) -> None:
        """Raise what eager raises where a label is no class."""

        def holds(place: Point) -> Expr:
            label = self.label(place)
            below = _b.lt(label, count_of([self.classes], DType.I64))
            return _b.or_(_b.eq(label, self.ignored), _b.and_(_b.ge(label, 0), below))

        t.require(
            Value(self.target.size, DType.BOOL, holds), IndexError, "Target is out of bounds."
        )


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    t: Builder, result: tuple[Result, Result], x: Value, target: Value, *rest: Any
) -> tuple[Value, Value] | None:
    """-weight[target] * x[target] of each place, their sum, or that over the sum of weights"""
    weight, reduction, ignored = rest
    if target.rank != x.rank - 1:
        return None
    labels = Labels(x, target, weight, ignored)
    labels.require(t)
    kind = result[0].dtype.computed_in
    if reduction == NONE and target.rank:
        loss = Value(result[0].size, result[0].dtype, lambda p: labels.loss_of(p, kind))
        return loss, Value(result[1].size, result[1].dtype, lambda _: const(0, kind))
    losses = summed(t, [], target.size, kind, lambda _, p: labels.loss_of(p, kind))
    weights = summed(t, [], target.size, kind, lambda _, p: labels.weight_of(p, kind))

    def load(point: Point) -> Expr:
        return _b.div(losses.load(()), weights.load(())) if reduction == MEAN else losses.load(())

    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, lambda _: weights.load(())),
    )


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    t: Builder, result: Result, grad: Value, x: Value, target: Value, *rest: Any
) -> Value | None:
    """-weight * grad where the class is the target's, over the sum of weights for a mean; else 0"""
    weight, reduction, ignored, total = rest
    if target.rank != x.rank - 1:
        return None
    labels, kind = Labels(x, target, weight, ignored), result.dtype.computed_in

    def load(point: Point) -> Expr:
        place = (*point[: labels.dim], *point[labels.dim + 1 :])
        label = labels.label(place)
        here = _b.eq(label, IndexValue(DType.I64, point[labels.dim]))
        value = _b.neg(cast(grad.load(place if grad.rank else ()), kind))
        if weight is not None:
            value = _b.mul(value, cast(weight.load((point[labels.dim],)), kind))
        if reduction == MEAN:
            value = _b.div(value, cast(total.load(()), kind))
        return _b.where(_b.and_(here, _b.ne(label, ignored)), value, const(0, kind))

    return Value(result.size, result.dtype, load)
