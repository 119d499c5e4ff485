"""Tensors of a graph as values in memory: sizes, strides, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stator.core.dtypes import from_torch
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Expr, Load, loads_of
from stator.loops.values import Point, Result, Value
from stator.lower.items import place_of
from stator.lower.sizes import Sizes
from stator.lower.target import CPU
from stator.torch_api import is_fake


def axes_of(name: str, hint: str, size: Sequence[Index]) -> tuple[Axis, ...]:
    """One axis for each size."""
    return tuple(Axis(f"{name}_{hint}{d}", n) for d, n in enumerate(size))


def point_of(axes: Sequence[Axis]) -> Point:
    """The point that the axes stand at; an axis of one position stands at 0."""
    return tuple(Index.of(axis) if axis.size.constant != 1 else Index.of(0) for axis in axes)


def contiguous(size: Sequence[Index]) -> tuple[Index, ...]:
    """Strides of row-major order."""
    stride, step = [], Index.of(1)
    for length in reversed(size):
        stride.append(step)
        step = step * length
    return tuple(reversed(stride))


def like_sources(expr: Expr, axes: Sequence[Axis]) -> tuple[Index, ...]:
    """Dense strides in the order in which the first load that moves along every axis steps."""
    moving = [axis for axis in axes if axis.size.constant != 1]
    for load in loads_of(expr):
        steps = {axis: load.index.factor_of(axis) for axis in moving}
        known = {axis: step.constant for axis, step in steps.items() if step is not None}
        if all(known.get(axis) for axis in moving):
            order = sorted(axes, key=lambda axis: -abs(known.get(axis) or 0))
            dense = dict(zip(order, contiguous([axis.size for axis in order]), strict=True))
            return tuple(dense[axis] for axis in axes)
    return contiguous([axis.size for axis in axes])


def extent(size: Sequence[Index], stride: Sequence[Index]) -> Index:
    """Elements from the first to the last, both included."""
    total = Index.of(1)
    for length, step in zip(size, stride, strict=True):
        total = total + (length - 1) * step
    return total


def stored(buffer: Buffer, size: Sequence[Index], stride: tuple[Index, ...]) -> Value:
    """A tensor that lies in memory."""

    def load(point: Point) -> Expr:
        return Load(buffer.dtype.computed_in, buffer, place_of(point, stride))

    return Value(tuple(size), buffer.dtype, load)


def layout_of(tensor: torch.Tensor, sizes: Sizes) -> tuple[tuple[Index, ...], tuple[Index, ...]]:
    """Sizes and strides of a tensor that `why_unsupported` has nothing against."""
    found = [*map(sizes.index, tensor.size()), *map(sizes.stride, tensor.stride())]
    known = [index for index in found if index is not None]
    assert len(known) == len(found), "checked before"
    return tuple(known[: tensor.dim()]), tuple(known[tensor.dim() :])


def from_memory(node: fx.Node, sizes: Sizes) -> Value:
    """The tensor of a node that exists at run time."""
    tensor = node.meta["val"]
    dtype = from_torch(tensor.dtype)
    assert dtype is not None, "checked before"
    size, stride = layout_of(tensor, sizes)
    return stored(Buffer(node.name, dtype, extent(size, stride)), size, stride)


def result_of(tensor: torch.Tensor, sizes: Sizes) -> Result:
    """What an operator has to return."""
    dtype = from_torch(tensor.dtype)
    assert dtype is not None, "checked before"
    return Result(layout_of(tensor, sizes)[0], dtype, tensor.device.type)


def why_unsupported(value: Any, sizes: Sizes, device: torch.device = CPU) -> str | None:
    """None for a tensor that loops on that device can read and write."""
    if not isinstance(value, torch.Tensor) or not is_fake(value):
        return "not a plain tensor"
    if value.device != device:
        return f"on {value.device}"
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return "not a strided tensor"
    if from_torch(value.dtype) is None:
        return f"elements of type {value.dtype}"
    for size in value.size():
        if sizes.index(size) is None:
            return f"a size of {size}, which the inputs do not show"
    for step in value.stride():
        if sizes.stride(step) is None:
            return f"a stride of {step}, which the inputs do not show"
    if any(isinstance(size, int) and size == 0 for size in value.size()):
        return "no elements"
    return None
