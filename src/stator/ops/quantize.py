"""Quantisation: floats as small integers, by a scale and a zero point, and back.

What PT2E makes of a model calls these operators, which torch runs in Python.  Every step is that of
torch's own text (torch/ao/quantization/fx/_decomposed.py), so that not one integer differs.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from stator.core.dtypes import TORCH_DTYPES, DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr
from stator.loops.values import Builder, Point, Result, Value
from stator.ops.arguments import dim_of
from stator.ops.reduce import combined, read_twice
from stator.ops.rising import Rising
from stator.ops.table import lowers
from stator.torch_api import decomposed_quantization

quantized: Final = decomposed_quantization()
DEQUANTIZERS: Final = frozenset(
    {
        quantized.dequantize_per_tensor.default,
        quantized.dequantize_per_tensor.tensor,
        quantized.dequantize_per_tensor.tensor2,
        quantized.dequantize_per_channel.default,
    }
)
_b = Body()

_TORCHS: Final = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}
_WIDE: Final = (DType.F32, DType.F64)
LEAST_SCALE: Final = 1e-30  # below, products are denormal and lose digits
_BOUNDS: Final = {DType.I8: (-128, 127), DType.U8: (0, 255), DType.I16: (-32768, 32767)}


@lowers(
    quantized.quantize_per_tensor.default,
    quantized.quantize_per_tensor.tensor,
    quantized.quantize_per_tensor.tensor2,
)
def quantize_per_tensor(
    t: Builder, result: Result, x: Value, scale: Any, zero_point: Any, *bounds: Any
) -> Value | None:
    """clamp(round(x * (1 / scale)) + zero_point, low, high)"""
    low, high, _ = bounds
    if x.dtype.computed_in is not DType.F32 or not _fits(low, high, result.dtype) or scale == 0:
        return None  # for torch to refuse
    inverse = _inverse(t, scale)

    def load(point: Point) -> Expr:
        given = x.load(point)
        before = _undone(given, scale, zero_point)
        if before is not None and before.dtype is result.dtype and _is_all(low, high, before.dtype):
            return before
        whole = _b.round(_b.mul(cast(given, DType.F32), inverse))
        return _clamped(_b.add(whole, _only(zero_point, DType.F32)), low, high)

    return Value(result.size, result.dtype, load)


@lowers(
    quantized.dequantize_per_tensor.default,
    quantized.dequantize_per_tensor.tensor,
    quantized.dequantize_per_tensor.tensor2,
)
def dequantize_per_tensor(
    t: Builder,
    result: Result,
    x: Value,
    scale: Any,
    zero_point: Any,
    *_: Any,
    **__: Any,
) -> Value | None:
    """(x - zero_point) * scale"""
    if x.dtype not in _BOUNDS or not (result.dtype is DType.F32 or _is_exact(x, zero_point)):
        return None

    def load(point: Point) -> Expr:
        return _real(x.load(point), scale, zero_point)

    return Value(result.size, result.dtype, load)


def _real(whole: Expr, scale: Any, zero_point: Any) -> Expr:
    """(x - zero_point) * scale"""
    apart = _b.sub(cast(whole, DType.F32), _only(zero_point, DType.F32))
    return _b.mul(apart, _only(scale, DType.F32))


def _undone(given: Expr, scale: Any, zero_point: Any) -> Expr | None:
    """The integer that was dequantised by the same numbers, of which quantising makes it again.

    It is at most 2**16 from the zero point.  Four roundings, of the scale, of its inverse and of
    two products, move it by 2**-6 at most, which the last one takes back.
    """
    rising = Rising.of(given)
    if rising is None or not isinstance(scale, float) or not isinstance(zero_point, int):
        return None
    is_usual = LEAST_SCALE < scale < 1 / LEAST_SCALE and rising.inner.dtype in _BOUNDS
    if not is_usual or _real(rising.inner, scale, zero_point) is not given:
        return None
    least, most = _BOUNDS[rising.inner.dtype]
    return rising.inner if least <= zero_point <= most else None


def _is_all(low: Any, high: Any, dtype: DType) -> bool:
    """Whether no integer of a type is beyond the bounds."""
    return (low, high) == _BOUNDS[dtype]


@lowers(quantized.quantize_per_channel.default)
def quantize_per_channel(
    t: Builder, result: Result, x: Value, scales: Value, zero_points: Value, axis: int, *bounds: Any
) -> Value | None:
    """clamp(round(x * (1 / scale)) + zero_point, low, high), with numbers for each channel"""
    low, high, _ = bounds
    if x.dtype.computed_in is not DType.F32 or not _fits(low, high, result.dtype):
        return None
    if scales.dtype not in _WIDE or zero_points.dtype.is_float:
        return None
    dim, kind = dim_of(axis, x), scales.dtype
    inverses = t.keep(Value(scales.size, kind, lambda p: _b.div(1, scales.load(p))))

    def load(point: Point) -> Expr:
        channel = (point[dim],)
        whole = _b.round(_b.mul(cast(x.load(point), kind), inverses.load(channel)))
        return _clamped(_b.add(whole, cast(zero_points.load(channel), kind)), low, high)

    return Value(result.size, result.dtype, load)


@lowers(quantized.dequantize_per_channel.default)
def dequantize_per_channel(
    t: Builder,
    result: Result,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    *_: Any,
    **__: Any,
) -> Value | None:
    """(x - zero_point) * scale, with numbers for each channel"""
    if x.dtype not in _BOUNDS or scales.dtype not in _WIDE:
        return None
    dim, kind = dim_of(axis, x), scales.dtype

    def load(point: Point) -> Expr:
        channel = (point[dim],)
        apart = x.load(point)
        if zero_points is not None:
            whole = _promoted(x.dtype, zero_points.dtype)  # small integers wrap, as eager's do
            apart = _b.sub(cast(apart, whole), cast(zero_points.load(channel), whole))
        return _b.mul(cast(apart, kind), scales.load(channel))

    return Value(result.size, result.dtype, load)


@lowers(quantized.choose_qparams.tensor)
def choose_qparams(
    t: Builder, result: tuple[Result, Result], x: Value, low: int, high: int, *rest: Any
) -> tuple[Value, Value] | None:
    """A scale and a zero point such that all of x, and zero, are between low and high"""
    if x.dtype is not DType.F32:
        return None  # half precision is rounded at each step
    eps, _ = rest
    least, most = _extremes(t, x)
    spread = _b.div(_b.sub(most, least), float(high - low))
    scale = t.keep(_single(DType.F32, _b.max(spread, eps))).load(())
    whole = cast(_b.round(_b.div(least, scale)), DType.I32)
    zero_point = _b.min(_b.max(_b.sub(low, whole), low), high)
    return _parameters(t, result, scale, zero_point)


@lowers(quantized.choose_qparams_symmetric.tensor)
def choose_qparams_symmetric(
    t: Builder, result: tuple[Result, Result], x: Value, low: int, high: int, *rest: Any
) -> tuple[Value, Value] | None:
    """A scale such that all of x is between low and high, with zero in the middle"""
    if x.dtype is not DType.F32:
        return None
    eps, dtype = rest
    least, most = _extremes(t, x)
    spread = _b.div(_b.max(_b.neg(least), most), float(high - low) / 2)
    zero_point = const(128 if dtype is torch.uint8 else 0, DType.I64)
    return _parameters(t, result, _b.max(spread, eps), zero_point)


def _extremes(t: Builder, x: Value) -> tuple[Expr, Expr]:
    """The least and the largest element, or zero if it is beyond them."""
    x = read_twice(t, x)
    dims = range(x.rank)
    least = combined(t, x, dims, Combine.MIN, DType.F32).load(())
    most = combined(t, x, dims, Combine.MAX, DType.F32).load(())
    return _b.min(least, 0.0), _b.max(most, 0.0)


def _parameters(
    t: Builder, result: tuple[Result, Result], scale: Expr, zero_point: Expr
) -> tuple[Value, Value]:
    """Computed once: whoever quantises reads them for every element."""
    kept = [
        t.keep(_single(one.dtype, cast(expr, one.dtype)))
        for one, expr in zip(result, (scale, zero_point), strict=True)
    ]
    first, second = (
        Value(one.size, one.dtype, lambda _, value=value: value.load(()))  # type: ignore[misc]
        for one, value in zip(result, kept, strict=True)
    )
    return first, second


def _single(dtype: DType, expr: Expr) -> Value:
    return Value((), dtype, lambda _: expr)


def _inverse(t: Builder, scale: Any) -> Expr:
    """1 / scale: in float64, and rounded to what it is multiplied in."""
    if not isinstance(scale, Value):
        return const(1.0 / scale, DType.F32)
    inverse = cast(_b.div(1.0, _only(scale, DType.F64)), DType.F32)
    return t.keep(_single(DType.F32, inverse)).load(())


def _only(number: Any, kind: DType) -> Expr:
    """A number, or a tensor's only element."""
    if isinstance(number, Value):
        return cast(number.load(tuple(Index.of(0) for _ in number.size)), kind)
    return const(number, kind)


def _clamped(value: Expr, low: Any, high: Any) -> Expr:
    return _b.min(_b.max(value, _only(low, value.dtype)), _only(high, value.dtype))


def _fits(low: Any, high: Any, dtype: DType) -> bool:
    """Whether integers from low to high are of a type that loops know; others may raise."""
    if dtype not in _BOUNDS or isinstance(low, Value) or isinstance(high, Value):
        return dtype in _BOUNDS
    least, most = _BOUNDS[dtype]
    return bool(least <= low and high <= most)


def _is_exact(x: Value, zero_point: Any) -> bool:
    """Whether x - zero_point has eight bits, so that half precision does not round it."""
    if x.dtype is DType.I16 or not isinstance(zero_point, int):
        return False
    least, most = _BOUNDS[x.dtype]
    return least <= zero_point <= most


def _promoted(first: DType, second: DType) -> DType:
    both = torch.promote_types(_TORCHS[first], _TORCHS[second])
    return TORCH_DTYPES[both].computed_in
