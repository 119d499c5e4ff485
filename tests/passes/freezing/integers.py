"""Integers that stand for floats, for graphs that passes are tried on."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, fx

from stator.passes.freezing.quantized import BOUNDS
from stator.torch_api import decomposed_quantization

quantized: Final = decomposed_quantization()


def integers(kind: torch.dtype, *size: int) -> Tensor:
    """All integers of a type."""
    low, high = BOUNDS[kind]
    return torch.randint(low, high + 1, size).to(kind)


def weight_of(*size: int) -> tuple[Tensor, Tensor]:
    """Integers, and a scale for each row."""
    return integers(torch.int8, *size), torch.rand(size[0]) * 0.01 + 0.001


def dequantized(x: Tensor) -> Tensor:
    """An input."""
    real: Tensor = quantized.dequantize_per_tensor.default(x, 0.05, 10, *BOUNDS[x.dtype], x.dtype)
    return real


def dequantized_weight(w: Tensor, scales: Tensor) -> Tensor:
    """A weight, by rows."""
    real: Tensor = quantized.dequantize_per_channel.default(
        w, scales, None, 0, -128, 127, torch.int8
    )
    return real


def exactly(x: Tensor, w: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What an input and a weight stand for, in float64."""
    by_rows = scales.double().view(-1, *[1] * (w.dim() - 1))
    return (x.double() - 10) * 0.05, w.double() * by_rows


def requantized(y: Tensor, kind: torch.dtype) -> Tensor:
    """A result."""
    whole: Tensor = quantized.quantize_per_tensor.default(y, 0.1, 7, *BOUNDS[kind], kind)
    return whole


def called(module: fx.GraphModule) -> list[str]:
    """What a graph calls."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
