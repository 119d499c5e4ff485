"""Tensors from nothing, and copies: full, arange, conversions."""

from __future__ import annotations

from typing import Any

import torch

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.ir import IndexValue
from stator.loops.values import Builder, Result, Value, broadcast
from stator.ops.table import lowers

aten = torch.ops.aten
_b = Body()


@lowers(aten._to_copy.default)
def to_copy(t: Builder, result: Result, x: Value, **options: Any) -> Value | None:
    """x in another type.  A conversion that was asked for rounds, even where nobody stores it."""
    if options.get("device") is not None and torch.device(options["device"]).type != "cpu":
        return None
    kind = result.dtype.computed_in
    value = Value(result.size, result.dtype, lambda p: cast(x.load(p), kind))
    return t.keep(value) if result.dtype is not kind else value


@lowers(aten.clone.default)
def clone(t: Builder, result: Result, x: Value, memory_format: Any = None) -> Value:
    """x, in memory of its own once somebody needs that."""
    return Value(result.size, x.dtype, x.load)


@lowers(aten.copy.default)
def copy(t: Builder, result: Result, x: Value, source: Value, non_blocking: bool = False) -> Value:
    """source, in the size and type of x."""
    kind = result.dtype.computed_in
    wide = broadcast(source, result.size)
    return Value(result.size, result.dtype, lambda p: cast(wide.load(p), kind))


@lowers(aten.full.default)
def full(t: Builder, result: Result, size: Any, value: Any, **options: Any) -> Value | None:
    """One number everywhere."""
    if not isinstance(value, int | float | bool):
        return None
    return Value(result.size, result.dtype, lambda _: const(value, result.dtype.computed_in))


@lowers(aten.full_like.default)
def full_like(t: Builder, result: Result, x: Any, value: Any, **options: Any) -> Value | None:
    """One number everywhere, in the size of x."""
    return full(t, result, None, value)


@lowers(aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
def zeros(t: Builder, result: Result, *args: Any, **options: Any) -> Value | None:
    """0 everywhere."""
    return full(t, result, None, 0)


@lowers(aten.ones_like.default, aten.ones.default, aten.new_ones.default)
def ones(t: Builder, result: Result, *args: Any, **options: Any) -> Value | None:
    """1 everywhere."""
    return full(t, result, None, 1)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(t: Builder, result: Result, value: Any, **options: Any) -> Value | None:
    """A number as a tensor."""
    return full(t, result, None, value)


@lowers(aten.arange.start_step)
def arange(
    t: Builder, result: Result, start: Any, end: Any, step: Any = 1, **options: Any
) -> Value | None:
    """start + step * i"""
    if result.dtype is not DType.I64 or not all(isinstance(n, int) for n in (start, step)):
        return None
    return Value(result.size, DType.I64, lambda p: IndexValue(DType.I64, p[0] * step + start))
