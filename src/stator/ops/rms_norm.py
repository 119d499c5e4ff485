"""RMS norm as torch has it on GPUs, one operator; elsewhere it is traced to its parts."""

from __future__ import annotations

from typing import Any, Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.reduce import count_of, read_twice
from stator.ops.table import lowers
from stator.ops.variance import inverse_deviation

aten = torch.ops.aten
_b = Body()

_EPS: Final = {
    DType.F32: torch.finfo(torch.float32).eps,
    DType.F64: torch.finfo(torch.float64).eps,
}


@lowers(aten._fused_rms_norm.default)
def rms_norm(
    t: Builder, result: tuple[Result, Result], x: Value, shape: Any, *parameters: Any
) -> tuple[Value, Value]:
    """x / sqrt(mean(x**2) + eps) * weight, and 1 / sqrt(mean(x**2) + eps)"""
    weight, eps = parameters
    x = read_twice(t, x)
    rows = x.rank - len(shape)
    kept, inner = x.size[:rows], x.size[rows:]
    kind = x.dtype.computed_in
    squares = t.reduce(
        Combine.SUM, kept, inner, lambda k, r: _b.square(cast(x.load((*k, *r)), kind))
    )
    eps = _EPS[kind] if eps is None else eps
    rstd = inverse_deviation(t, squares, count_of(inner, kind), eps)

    def load(point: Point) -> Expr:
        value = _b.mul(cast(x.load(point), kind), rstd.load(point[:rows]))
        return value if weight is None else _b.mul(value, cast(weight.load(point[rows:]), kind))

    return (
        Value(result[0].size, result[0].dtype, load),
        Value(result[1].size, result[1].dtype, lambda p: rstd.load(p[:rows])),
    )


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    t: Builder, result: tuple[Result | None, ...], grad: Value, x: Value, *rest: Any
) -> tuple[Value | None, ...]:
    """With g = grad * weight and n = x * rstd, averages taken over a row:

    rstd * (g - n * mean(g * n)), sum of grad * n over rows
    """
    shape, rstd, weight, _ = rest
    grad, x = read_twice(t, grad), read_twice(t, x)
    rows = x.rank - len(shape)
    kept, inner = x.size[:rows], x.size[rows:]
    kind = x.dtype.computed_in

    def of_row(point: Point) -> Expr:
        ones = [Index.of(0)] * (rstd.rank - rows)
        return cast(rstd.load((*point[:rows], *ones)), kind)

    def normal(point: Point) -> Expr:
        return _b.mul(cast(x.load(point), kind), of_row(point))

    def weighted(point: Point) -> Expr:
        value = cast(grad.load(point), kind)
        return value if weight is None else _b.mul(value, cast(weight.load(point[rows:]), kind))

    def for_input(wanted: Result) -> Value:
        along = t.reduce(
            Combine.SUM, kept, inner, lambda k, r: _b.mul(weighted((*k, *r)), normal((*k, *r)))
        )
        count = count_of(inner, kind)

        def load(point: Point) -> Expr:
            slope = _b.mul(normal(point), _b.div(along.load(point[:rows]), count))
            return _b.mul(of_row(point), _b.sub(weighted(point), slope))

        return Value(wanted.size, wanted.dtype, load)

    def for_weight(wanted: Result) -> Value:
        def product(column: Point, row: Point) -> Expr:
            point = (*row, *column)
            return _b.mul(cast(grad.load(point), kind), normal(point))

        total = t.reduce(Combine.SUM, inner, kept, product)
        return Value(wanted.size, wanted.dtype, total.load)

    of_input, of_weight = result
    return (
        None if of_input is None else for_input(of_input),
        None if of_weight is None else for_weight(of_weight),
    )
