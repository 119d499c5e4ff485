"""Where the extremes are: argmax, and max along a dimension with its indices."""

from __future__ import annotations

from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.half import as_held
from stator.loops.ir import Combine, Expr, IndexValue
from stator.loops.values import Builder, Point, Result, Value, flat
from stator.ops.reduce import combined, join, over, read_twice, reduced_dims, shaped
from stator.ops.table import Exact, lowers

aten = torch.ops.aten
_b = Body()

NOWHERE = (1 << 63) - 1  # behind every index


def _extreme(t: Builder, x: Value, dims: list[int], combine: Combine) -> tuple[Value, Value]:
    """The extreme, and the least index of an element that equals it, NaN being equal to NaN."""
    x = as_held(read_twice(t, x))  # what is searched for has to be there
    kind = x.dtype.computed_in
    found = combined(t, x, dims, combine, kind)
    sizes = [x.size[d] for d in dims]

    def place(kept: Point, reduced: Point) -> Expr:
        value = cast(x.load(join(x.rank, dims, kept, reduced)), kind)
        same = _b.eq(value, found.load(kept))
        if kind.is_float:
            same = _b.or_(same, _b.is_nan(value))
        here = IndexValue(DType.I64, flat(reduced, sizes))
        return _b.where(same, here, const(NOWHERE, DType.I64))

    return found, over(t, x, dims, Combine.MIN, place)


def _with_index(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int, combine: Combine
) -> tuple[Value, Value]:
    dims = reduced_dims(x, dim)
    found, place = _extreme(t, x, dims, combine)
    return shaped(found, result[0], dims), shaped(place, result[1], dims)


@lowers(aten.max.dim, exact=Exact.INTEGERS)
def max_dim(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value]:
    """Largest element of a dimension, and where it is first; NaN if there is one."""
    return _with_index(t, result, x, dim, Combine.MAX)


@lowers(aten.min.dim, exact=Exact.INTEGERS)
def min_dim(
    t: Builder, result: tuple[Result, Result], x: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value]:
    """Smallest element of a dimension, and where it is first; NaN if there is one."""
    return _with_index(t, result, x, dim, Combine.MIN)


@lowers(aten.argmax.default, exact=Exact.INTEGERS)
def argmax(t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """Where the largest element is first, NaN being the largest."""
    dims = reduced_dims(x, dim)
    return shaped(_extreme(t, x, dims, Combine.MAX)[1], result, dims)


@lowers(aten.argmin.default, exact=Exact.INTEGERS)
def argmin(t: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """Where the smallest element is first, NaN being the smallest."""
    dims = reduced_dims(x, dim)
    return shaped(_extreme(t, x, dims, Combine.MIN)[1], result, dims)
