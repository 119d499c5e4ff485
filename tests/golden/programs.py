"""Small programs whose kernels are kept as text: what each computes, and how many kernels it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Program:
    """A function, arguments for it, and how many kernels are to come out."""

    run: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    kernels: int = 1
    dynamic: bool = False  # whether sizes are symbols

    @property
    def name(self) -> str:
        """Of the function; also of the file that holds its kernels."""
        return ("dynamic_" if self.dynamic else "") + self.run.__name__


def floats(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers."""
    return torch.randn(size).to(dtype)


def indices(count: int, below: int) -> Tensor:
    """Random places."""
    return torch.randint(0, below, (count,))


# --- rows: softmax, norms, losses ---


def softmax(x: Tensor) -> Tensor:
    """softmax over the last dimension"""
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    """log_softmax over the last dimension"""
    return x.log_softmax(-1)


def softmax_over_columns(x: Tensor) -> Tensor:
    """softmax over the first dimension"""
    return x.softmax(0)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """softmax of what a mask leaves"""
    return x.masked_fill(mask, float("-inf")).softmax(-1)


def causal_softmax(x: Tensor) -> Tensor:
    """softmax below the diagonal, as attention does it"""
    mask = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return (x / 8.0).masked_fill(~mask, float("-inf")).softmax(-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """layer norm with weight and bias"""
    return F.layer_norm(x, (64,), weight, bias)


def layer_norm_half(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """layer norm of bf16"""
    return F.layer_norm(x, (64,), weight, bias)


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """a sum, and its rms norm"""
    total = x + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    return total * scale * weight, total


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """group norm over channels and pixels"""
    return F.group_norm(x, 2, weight, bias)


def batch_norm_eval(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """batch norm with known statistics"""
    return F.batch_norm(x, mean, variance, weight, bias)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """cross entropy of logits and classes"""
    return F.cross_entropy(x, target)


def cross_entropy_rows(x: Tensor, target: Tensor) -> Tensor:
    """cross entropy of each row"""
    return F.cross_entropy(x, target, reduction="none")


def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """mean of squared differences"""
    return F.mse_loss(x, target)


# --- points: activations, gates, optimizers ---


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu of a sum"""
    return F.gelu(x + bias)


def bias_tanh_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu of a sum, by tanh"""
    return F.gelu(x + bias, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu of one half times the other"""
    return F.silu(gate) * up


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """rotary embedding: pairs of halves are turned"""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine + turned * sine


def residual(x: Tensor, y: Tensor) -> Tensor:
    """what dropout leaves of a residual sum when it is off"""
    return x + F.dropout(y, 0.1, training=False)


def adamw(p: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    """one step of AdamW for one parameter"""
    mean = mean.lerp(grad, 0.1)
    square = square * 0.999 + grad * grad * 0.001
    step = mean / (square.sqrt() / 0.03 + 1e-8)
    return p * 0.9999 - 0.001 * step, mean, square


def where_compare(x: Tensor, y: Tensor) -> Tensor:
    """one of two, by comparing them"""
    return torch.where(x > y, x, -y)


def clamp(x: Tensor) -> Tensor:
    """a number put between two others"""
    return x.clamp(-1.0, 6.0)


def half_add(x: Tensor, y: Tensor) -> Tensor:
    """a sum of bf16"""
    return x + y


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """f32 to int8"""
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """int8 to f32"""
    return x.to(torch.float32) * scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 to int8, each row by its largest number"""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


# --- reductions ---


def sum_rows(x: Tensor) -> Tensor:
    """sums along the last dimension"""
    return x.sum(-1)


def sum_columns(x: Tensor) -> Tensor:
    """sums along the first dimension"""
    return x.sum(0)


def sum_all(x: Tensor) -> Tensor:
    """one sum of everything, in two steps so that threads can share it"""
    return x.sum()


def mean(x: Tensor) -> Tensor:
    """means along the last dimension"""
    return x.mean(-1)


def amax(x: Tensor) -> Tensor:
    """maxima along the last dimension"""
    return x.amax(-1)


def argmax(x: Tensor) -> Tensor:
    """where the maxima are"""
    return x.argmax(-1)


def variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """variance and mean along the last dimension"""
    spread, center = torch.var_mean(x, -1)
    return spread, center


def max_pool(x: Tensor) -> Tensor:
    """maxima of windows of two by two"""
    return F.max_pool2d(x, 2)


def average_pool(x: Tensor) -> Tensor:
    """means of windows of three by three, with padding"""
    return F.avg_pool2d(x, 3, stride=2, padding=1)


# --- moving elements ---


def cat(x: Tensor, y: Tensor) -> Tensor:
    """two tensors side by side"""
    return torch.cat((x, y), dim=-1)


def pad(x: Tensor) -> Tensor:
    """zeros around a tensor"""
    return F.pad(x, (1, 2, 3, 1))


def tril(x: Tensor) -> Tensor:
    """what lies below the diagonal"""
    return x.tril()


def slices(x: Tensor) -> Tensor:
    """every second column against its neighbour"""
    return x[:, ::2] - x[:, 1::2]


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    """a transposed tensor and a plain one"""
    return x.t() + y


def merged_heads(x: Tensor, bias: Tensor) -> Tensor:
    """two dimensions, exchanged and merged, and then a sum of the row"""
    y = x.transpose(0, 1).reshape(8, 64) + bias
    return y - y.mean(-1, keepdim=True)


def expand(x: Tensor, y: Tensor) -> Tensor:
    """a column against a row"""
    return x[:, None] * y[None, :]


def embedding(table: Tensor, index: Tensor) -> Tensor:
    """rows of a table"""
    return F.embedding(index, table)


def index_add(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """rows added to computed rows"""
    return x.index_add(0, index, source)


def scatter(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """elements written to computed places"""
    return x.scatter(1, index, source)


def one_hot(x: Tensor, index: Tensor) -> Tensor:
    """one number a row written into zeros, and read"""
    return torch.zeros_like(x).scatter(1, index, 1.0) * x


def gather(x: Tensor, index: Tensor) -> Tensor:
    """elements read from computed places"""
    return x.gather(1, index)


def cumsum(x: Tensor) -> Tensor:
    """running sums along the last dimension"""
    return x.cumsum(-1)


def cumsum_columns(x: Tensor) -> Tensor:
    """running sums along the first dimension"""
    return x.cumsum(0)


NORM: Final = ((8, 64), (64,), (64,))

PROGRAMS: Final = (
    Program(softmax, lambda: (floats(8, 64),)),
    Program(log_softmax, lambda: (floats(8, 64),)),
    Program(softmax_over_columns, lambda: (floats(8, 64),)),
    Program(masked_softmax, lambda: (floats(8, 64), floats(8, 64) > 0)),
    Program(causal_softmax, lambda: (floats(2, 16, 16),)),
    Program(layer_norm, lambda: (floats(8, 64), floats(64), floats(64))),
    Program(layer_norm_half, lambda: tuple(floats(*n, dtype=torch.bfloat16) for n in NORM)),
    Program(rms_norm_residual, lambda: (floats(8, 64), floats(8, 64), floats(64))),
    Program(group_norm, lambda: (floats(2, 4, 6, 6), floats(4), floats(4)), kernels=2),
    Program(batch_norm_eval, lambda: (floats(2, 4, 6, 6), *floats(4, 4).abs().unbind()), kernels=2),
    Program(cross_entropy, lambda: (floats(8, 64), indices(8, 64)), kernels=2),
    Program(cross_entropy_rows, lambda: (floats(8, 64), indices(8, 64)), kernels=2),
    Program(mse_loss, lambda: (floats(8, 64), floats(8, 64))),
    Program(bias_gelu, lambda: (floats(8, 64), floats(64))),
    Program(bias_tanh_gelu, lambda: (floats(8, 64), floats(64))),
    Program(swiglu, lambda: (floats(8, 64), floats(8, 64))),
    Program(rotary, lambda: (floats(2, 4, 8, 16), floats(8, 16), floats(8, 16))),
    Program(residual, lambda: (floats(8, 64), floats(8, 64))),
    Program(adamw, lambda: (floats(64, 8), floats(64, 8), floats(64, 8), floats(64, 8).abs())),
    Program(where_compare, lambda: (floats(8, 64), floats(8, 64))),
    Program(clamp, lambda: (floats(8, 64),)),
    Program(half_add, lambda: tuple(floats(8, 64, dtype=torch.bfloat16) for _ in range(2))),
    Program(quantize, lambda: (floats(8, 64), floats(64).abs() + 1)),
    Program(dequantize, lambda: (torch.randint(-128, 128, (8, 64), dtype=torch.int8), floats(64))),
    Program(quantize_rows, lambda: (floats(8, 64),)),
    Program(sum_rows, lambda: (floats(8, 64),)),
    Program(sum_columns, lambda: (floats(8, 64),)),
    Program(sum_all, lambda: (floats(512, 256),), kernels=2),
    Program(mean, lambda: (floats(8, 64),)),
    Program(amax, lambda: (floats(8, 64),)),
    Program(argmax, lambda: (floats(8, 64),)),
    Program(variance, lambda: (floats(8, 64),)),
    Program(max_pool, lambda: (floats(2, 3, 8, 8),)),
    Program(average_pool, lambda: (floats(2, 3, 8, 8),)),
    Program(cat, lambda: (floats(32, 24), floats(32, 40))),
    Program(pad, lambda: (floats(8, 16),)),
    Program(tril, lambda: (floats(8, 8),)),
    Program(slices, lambda: (floats(8, 64),)),
    Program(transpose_add, lambda: (floats(8, 64), floats(64, 8))),
    Program(merged_heads, lambda: (floats(4, 8, 16), floats(64))),
    Program(expand, lambda: (floats(8), floats(64))),
    Program(embedding, lambda: (floats(10, 64), indices(8, 10))),
    Program(index_add, lambda: (floats(10, 64), indices(8, 10), floats(8, 64)), kernels=3),
    Program(scatter, lambda: (floats(8, 64), indices(40, 64).view(8, 5), floats(8, 5)), kernels=3),
    Program(one_hot, lambda: (floats(8, 64), indices(8, 64).view(8, 1))),
    Program(gather, lambda: (floats(8, 64), indices(40, 64).view(8, 5))),
    Program(cumsum, lambda: (floats(8, 64),)),
    Program(cumsum_columns, lambda: (floats(8, 64),)),
    Program(softmax, lambda: (floats(8, 64),), dynamic=True),
    Program(layer_norm, lambda: (floats(8, 64), floats(64), floats(64)), dynamic=True),
    Program(bias_gelu, lambda: (floats(8, 64), floats(64)), dynamic=True),
    Program(cat, lambda: (floats(32, 24), floats(32, 40)), dynamic=True),
    Program(sum_columns, lambda: (floats(8, 64),), dynamic=True),
)
