"""Gates: one half of a dimension decides how much of the other passes."""

from __future__ import annotations

import torch

from stator.loops.build import Body, cast
from stator.loops.ir import Expr, within
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import dim_of, replaced
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


@lowers(aten.glu.default)
def glu(t: Builder, result: Result, x: Value, dim: int = -1) -> Value:
    """x[:n] * sigmoid(x[n:])"""
    dim = dim_of(dim, x)
    half = result.size[dim]

    def load(point: Point) -> Expr:
        gate = x.load(replaced(point, dim, point[dim] + half))
        return _b.mul(x.load(point), _b.sigmoid(gate))

    return Value(result.size, result.dtype, load)


@lowers(aten.glu_backward.default)
def glu_backward(t: Builder, result: Result, grad: Value, x: Value, dim: int) -> Value:
    """grad * s for the first half; grad * x[:n] * s * (1 - s) for the second; s = sigmoid(x[n:])"""
    dim = dim_of(dim, x)
    half = grad.size[dim]
    kind = result.dtype.computed_in

    def load(point: Point) -> Expr:
        behind = point[dim] - half
        first = cast(grad.load(point), kind)
        first = _b.mul(first, _b.sigmoid(x.load(replaced(point, dim, point[dim] + half))))
        open_ = _b.sigmoid(x.load(point))
        passed = _b.mul(cast(grad.load(replaced(point, dim, behind)), kind), open_)
        second = _b.mul(x.load(replaced(point, dim, behind)), _b.sub(1, open_))
        return within(point[dim], half, first, _b.mul(passed, second))

    return Value(result.size, result.dtype, load)
