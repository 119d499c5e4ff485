"""Programs that the passes for known weights leave alone: kept as text, with what they note.

The docstring of a program is its title.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from stator.passes.freezing.drop_casts import drop_casts
from stator.passes.freezing.fold_batch_norm import fold_batch_norm
from stator.passes.freezing.fold_binary import fold_binary
from stator.passes.freezing.int8_convolution import int8_convolution
from stator.passes.freezing.int8_linear import int8_linear
from stator.passes.freezing.int8_weight_only import int8_weight_only
from stator.passes.freezing.join_linears import join_linears
from stator.passes.freezing.pack_convolution import pack_convolution
from stator.passes.freezing.pack_linear import pack_linear
from stator.passes.freezing.pack_lstm import pack_lstm
from stator.passes.post_grad.add_into_convolution import add_into_convolution
from stator.passes.post_grad.fuse_conv_activation import fuse_conv_activation
from tests.golden.rewrites import Example, floats, whole_numbers
from tests.passes.freezing.integers import dequantized, dequantized_weight, integers, weight_of

aten = torch.ops.aten

# --- integers ---


def of_floats(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """a product of floats with a dequantised weight"""
    return F.linear(x.float(), dequantized_weight(w, scales), bias)


def untransposed(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    """a product along the channels of its weight"""
    return dequantized(x) @ dequantized_weight(w, scales)


def transposed_image(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """a transposed convolution"""
    return F.conv_transpose2d(dequantized(x), dequantized_weight(w, scales))


def of_signed_pixels(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """a convolution of signed integers"""
    return F.conv2d(dequantized(x.char()), dequantized_weight(w, scales))


def unscaled(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """a product with a weight of integers that nothing scales"""
    return torch.mm(x, w.t().to(x.dtype)) + scales


def halves(depth: int) -> Callable[[], tuple[Tensor, ...]]:
    """An input of half precision, a weight of integers, and its scales."""
    return lambda: (
        torch.randn(2, depth).bfloat16(),
        integers(torch.int8, 4, depth),
        torch.rand(4).bfloat16(),
    )


def of_odd_depth(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """a product with a weight of integers whose depth torch's kernel cannot take"""
    return torch.mm(x, w.t().to(x.dtype)) * scales


# --- folds ---


def rounded_on_the_way(x: Tensor) -> Tensor:
    """a trip through fewer digits"""
    return x.bfloat16().view(3, 2).float()


def wide_value_read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """a trip whose wide value others read"""
    y = x.double()
    return y.view(3, 2).float(), y.sum()


def convolution_read_twice(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """a batch norm behind a convolution that others read"""
    y = F.conv2d(x, w)
    return F.batch_norm(y, mean, var) + y


def in_training(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """a batch norm with the statistics of its input"""
    return F.batch_norm(F.conv2d(x, w), mean, var, training=True)


def behind_relu(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """a batch norm behind an activation"""
    return F.batch_norm(F.conv2d(x, w).relu(), mean, var)


def of_halves(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """a batch norm behind a convolution of float16"""
    return F.batch_norm(F.conv2d(x.half(), w.half()), mean, var)


def divided_by(x: Tensor, w: Tensor, bias: Tensor, c: Tensor) -> Tensor:
    """a constant divided by a product"""
    return c / F.linear(x, w, bias)


def scaled_by_rows(x: Tensor, w: Tensor, bias: Tensor, c: Tensor) -> Tensor:
    """a product scaled by rows"""
    return F.linear(x, w, bias) * c[:2, None]


def scaled_with_more_digits(x: Tensor, w: Tensor, bias: Tensor, c: Tensor) -> Tensor:
    """a product scaled with more digits, which the caller gets"""
    return F.linear(x, w, bias).double() * c.double()


def returned_part(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """products of one input, one of which the caller gets"""
    return x @ v, (x @ w).relu()


def of_two_inputs(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """products of two inputs"""
    return (x @ v).relu() + (x.exp() @ w).relu()


def weight_that_changes(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """products of one input, one with a weight that is none"""
    return (x @ v).relu() * (x @ w).relu()


# --- packs ---


def small_product(x: Tensor, w: Tensor) -> Tensor:
    """a product with a small weight"""
    return F.linear(x, w)


def turned_product(x: Tensor, w: Tensor) -> Tensor:
    """a product whose input lies by columns"""
    return F.linear(x.t(), w)


def batched_product(x: Tensor, w: Tensor) -> Tensor:
    """a product of batches"""
    return torch.bmm(x, w)


def line(x: Tensor, w: Tensor) -> Tensor:
    """a convolution of lines"""
    return F.conv1d(x, w)


def doubled(x: Tensor, w: Tensor) -> Tensor:
    """a convolution of float64"""
    return F.conv2d(x.double(), w.double())


def widely_padded(x: Tensor, w: Tensor) -> Tensor:
    """a transposed convolution whose result is padded by a stride"""
    return F.conv_transpose2d(x, w, stride=2, dilation=3, output_padding=2)


def trained_layer(x: Tensor, state: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """a layer of an LSTM that is trained"""
    none = torch.zeros(16)
    what: tuple[Any, ...] = (False, [], 2, 4, 1, False, False, False, True)
    said: Tensor = aten.mkldnn_rnn_layer.default(x, w, u, none, none, state, state, *what)[0]
    return said


# --- what libraries do behind convolutions ---


def to_the_input(x: Tensor, w: Tensor) -> Tensor:
    """a convolution added to what the caller holds"""
    return convolved(x.exp(), w) + x


def read_later(x: Tensor, w: Tensor) -> Tensor:
    """a convolution added to what is read later"""
    y = convolved(x, w)
    return (convolved(y.exp(), w) + y) * y.sin()


def convolved(x: Tensor, w: Tensor) -> Tensor:
    """One as it is packed."""
    call = torch.ops.mkldnn._convolution_pointwise
    made: Tensor = call(x, w, None, [0, 0], [1, 1], [1, 1], 1, "none", [], "")
    return made


def with_relu(x: Tensor, w: Tensor) -> Tensor:
    """a relu"""
    return F.conv2d(x, w, padding=1).relu()


def with_silu_in_passing(x: Tensor, w: Tensor) -> Tensor:
    """a silu that a kernel reads"""
    return F.silu(F.conv2d(x, w, padding=1)) + 1


IMAGES: Final = floats((1, 3, 8, 8), (4, 3, 3, 3), (4,), (4,))
ROWS: Final = floats((2, 3), (4, 3), (4,), (4,))
PAIR: Final = floats((2, 3), (3, 4), (3, 4))
BYTES: Final = whole_numbers(4)
PIXELS: Final = whole_numbers(4, 2, 2)


def pixels() -> tuple[Tensor, ...]:
    """An image of bytes, and a weight for it with its scales."""
    return integers(torch.uint8, 1, 4, 5, 5), *weight_of(4, 4, 2, 2)


def statistics() -> tuple[Tensor, ...]:
    """An image, a weight, means and variances."""
    x, w, mean, var = IMAGES()
    return x, w, mean, var.abs()


def laid_last() -> tuple[Tensor, ...]:
    """An image with its channels last, as oneDNN's results lie, and a weight."""
    x, w = floats((1, 3, 8, 8), (3, 3, 1, 1))()
    return x.contiguous(memory_format=torch.channels_last), w


REFUSALS: Final = (
    Example(int8_linear, of_floats, BYTES, weights=(1, 2, 3)),
    Example(int8_linear, untransposed, BYTES, weights=(1, 2, 3)),
    Example(int8_convolution, transposed_image, pixels, weights=(1, 2)),
    Example(int8_convolution, of_signed_pixels, pixels, weights=(1, 2)),
    Example(int8_weight_only, unscaled, halves(32), weights=(1, 2)),
    Example(int8_weight_only, of_odd_depth, halves(24), weights=(1, 2)),
    Example(drop_casts, rounded_on_the_way, floats((2, 3))),
    Example(drop_casts, wide_value_read_twice, floats((2, 3))),
    Example(fold_batch_norm, convolution_read_twice, statistics, weights=(1, 2, 3)),
    Example(fold_batch_norm, in_training, statistics, weights=(1, 2, 3)),
    Example(fold_batch_norm, behind_relu, statistics, weights=(1, 2, 3)),
    Example(fold_batch_norm, of_halves, statistics, weights=(1, 2, 3)),
    Example(fold_binary, divided_by, ROWS, weights=(1, 2, 3)),
    Example(fold_binary, scaled_by_rows, ROWS, weights=(1, 2, 3)),
    Example(fold_binary, scaled_with_more_digits, ROWS, weights=(1, 2, 3)),
    Example(join_linears, returned_part, PAIR, weights=(1, 2)),
    Example(join_linears, of_two_inputs, PAIR, weights=(1, 2)),
    Example(join_linears, weight_that_changes, PAIR, weights=(1,)),
    Example(pack_linear, small_product, floats((2, 64), (32, 64)), weights=(1,)),
    Example(pack_linear, turned_product, floats((256, 8), (256, 256)), weights=(1,)),
    Example(pack_linear, batched_product, floats((2, 8, 256), (2, 256, 256)), weights=(1,)),
    Example(pack_convolution, line, floats((1, 3, 8), (4, 3, 3)), weights=(1,)),
    Example(pack_convolution, doubled, floats((1, 3, 8, 8), (4, 3, 3, 3)), weights=(1,)),
    Example(pack_convolution, widely_padded, floats((1, 3, 8, 8), (3, 4, 3, 3)), weights=(1,)),
    Example(
        pack_lstm,
        trained_layer,
        floats((5, 2, 3), (1, 2, 4), (16, 3), (16, 4)),
        weights=(2, 3),
    ),
    Example(add_into_convolution, to_the_input, laid_last),
    Example(add_into_convolution, read_later, laid_last),
    Example(fuse_conv_activation, with_relu, floats((1, 3, 64, 64), (64, 3, 3, 3))),
    Example(fuse_conv_activation, with_silu_in_passing, floats((1, 3, 64, 64), (64, 3, 3, 3))),
)
