"""Layer norm's derivative: one pass in rows for the input, one in columns for the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import count_of, read_twice
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    t: Builder, result: tuple[Result | None, ...], grad: Value, x: Value, *rest: Any
) -> tuple[Value | None, ...]:
    """With g = grad * weight and n = (x - mean) * rstd, averages taken over a row:

    rstd * (g - mean(g) - n * mean(g * n)), sum of grad * n over rows, sum of grad over rows
    """
    shape, mean, rstd, weight, _, _ = rest
    grad, x = read_twice(t, grad), read_twice(t, x)
    rows = x.rank - len(shape)
    kept, inner = x.size[:rows], x.size[rows:]
    kind = x.dtype.computed_in

    def of_row(value: Value, point: Point) -> Expr:
        ones = [Index.of(0)] * (value.rank - rows)
        return cast(value.load((*point[:rows], *ones)), kind)

    def normal(point: Point) -> Expr:
        apart = _b.sub(cast(x.load(point), kind), of_row(mean, point))
        return _b.mul(apart, of_row(rstd, point))

    def weighted(point: Point) -> Expr:
        value = cast(grad.load(point), kind)
        return value if weight is None else _b.mul(value, cast(weight.load(point[rows:]), kind))

    def for_input(wanted: Result) -> Value:
        count = count_of(inner, kind)
        plain = t.reduce(Combine.SUM, kept, inner, lambda k, r: weighted((*k, *r)))
        along = t.reduce(
            Combine.SUM, kept, inner, lambda k, r: _b.mul(weighted((*k, *r)), normal((*k, *r)))
        )

        def load(point: Point) -> Expr:
            outer = point[:rows]
            shift = _b.div(plain.load(outer), count)
            slope = _b.mul(normal(point), _b.div(along.load(outer), count))
            return _b.mul(of_row(rstd, point), _b.sub(_b.sub(weighted(point), shift), slope))

        return Value(wanted.size, wanted.dtype, load)

    def product(point: Point) -> Expr:
        return _b.mul(cast(grad.load(point), kind), normal(point))

    def over_rows(wanted: Result, body: Callable[[Point], Expr]) -> Value:
        total = t.reduce(Combine.SUM, inner, kept, lambda c, r: body((*r, *c)))
        return Value(wanted.size, wanted.dtype, total.load)

    of_input, of_weight, of_bias = result
    return (
        None if of_input is None else for_input(of_input),
        None if of_weight is None else over_rows(of_weight, product),
        None if of_bias is None else over_rows(of_bias, lambda p: cast(grad.load(p), kind)),
    )
