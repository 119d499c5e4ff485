"""A program for every pass: what it is kept for as text, before and after.

Rules bring examples of their own, which docs/passes.md shows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from stator.graph.run import GraphPass
from stator.options import Options
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
from stator.passes.joint.channels_last import channels_last
from stator.passes.joint.drop_noops import drop_noops
from stator.passes.joint.fold_uniform import fold_uniform
from stator.passes.joint.narrow_indices import narrow_indices
from stator.passes.joint.pad_mm import pad_mm
from stator.passes.joint.seed_random import seed_random
from stator.passes.joint.share_forward import share_forward
from stator.passes.joint.spell_softmax import spell_softmax
from stator.passes.post_grad.add_into_convolution import add_into_convolution
from stator.passes.post_grad.cancel_cat_split import cancel_cat_split
from stator.passes.post_grad.drop_vectors import drop_vectors
from stator.passes.post_grad.fold_cumsum import fold_cumsum
from stator.passes.post_grad.fuse_conv_activation import fuse_conv_activation
from stator.passes.post_grad.hold_to_promise import hold_to_promise
from stator.passes.post_grad.linear_to_onednn import LARGE_WEIGHT, linear_to_onednn
from stator.passes.post_grad.reorder_for_memory import reorder_for_memory
from stator.passes.post_grad.share_subexpressions import share_subexpressions
from stator.passes.post_grad.unroll_foreach import unroll_foreach
from stator.passes.post_grad.write_in_place import write_in_place
from stator.passes.pre_grad.fuse_attention import fuse_attention
from stator.passes.pre_grad.normalize_keywords import normalize_keywords
from stator.passes.pre_grad.settle_dropout import settle_dropout
from stator.passes.pre_grad.spell_dropout import spell_dropout
from tests.passes.freezing.integers import (
    dequantized,
    dequantized_weight,
    integers,
    requantized,
    weight_of,
)

DEPTH: Final = 512


@dataclass(frozen=True, slots=True)
class Example:
    """A pass, a program that it changes, and arguments for that."""

    pass_: GraphPass
    program: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    weights: tuple[int, ...] = ()  # positions of arguments that stay the same from call to call
    options: Options = field(default_factory=Options)

    @property
    def name(self) -> str:
        """Of the pass; also of the file that holds the text."""
        return self.pass_.__name__


# Operators of a user's: one that is pure, one that writes.


@torch.library.custom_op("stator_golden::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("stator_golden::fill", mutates_args=("out",))
def fill(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


# --- programs ---


def numpy_keywords(x: Tensor) -> Tensor:
    return torch.sum(x, axis=1, keepdims=True)


def dropout_at_both_ends(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=False) + F.dropout(x, 1.0)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 2.0
    return torch.softmax(scores + mask, dim=-1) @ v


def views_and_copies(x: Tensor) -> Tensor:
    return x.view(2, 3).clone().sin()


def ones_and_zeros(x: Tensor) -> Tensor:
    ones = torch.ones_like(x)
    return x * ones - (ones * 3.0).expand(4, 2, 3)


def pooled_and_back(x: Tensor, grad: Tensor) -> Tensor:
    """The backward of max pooling reads where the largest elements lie."""
    places = torch.ops.aten.max_pool2d_with_indices(x, [2, 2])[1]
    return torch.ops.aten.max_pool2d_with_indices_backward(
        grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
    )


def shallow_product(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def convolutions(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = F.conv2d(x, w, padding=1).relu()
    return x


def lists(x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch._foreach_add([x, y], 1))


def the_same_twice(x: Tensor) -> Tensor:
    return x.sin() + x.sin()


def cats_and_splits(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    left, right = x.split(2)
    pair = torch.cat([x, y])
    return torch.cat([left, right]).sin(), pair[:4].cos(), torch.cat([torch.cat([x, y]), x])


def running_sum() -> Tensor:
    return torch.full((2, 3), 5).cumsum(1)


def written_to(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.stator_golden.fill(out, x)
    return out.sin()


def large_linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w, bias)


def activated_image(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, w, bias, padding=1))


def added_images(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    convolve = torch.ops.mkldnn._convolution_pointwise
    y, z = (convolve(x, one, None, [0, 0], [1, 1], [1, 1], 1, "none", [], "") for one in (w, v))
    return y + z + x


def halved_and_doubled(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.conv_transpose2d(F.conv2d(x, w, stride=2), v, stride=2)


def remembered(x: Tensor, state: Tensor, w: Tensor, u: Tensor) -> Tensor:
    said, *_ = torch.lstm(x, (state, state), (w, u), False, 1, 0.0, False, False, False)
    return said


def foretold(x: Tensor) -> Tensor:
    return torch.ops.stator_golden.twice(x).sin()


def random_numbers(x: Tensor) -> Tensor:
    return torch.rand(2, 3) + torch.rand_like(x)


def sums_of_products(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x @ v, x @ w
    return first.sum(), second.sum()


def normalized_image(x: Tensor, w: Tensor, mean: Tensor, var: Tensor, factor: Tensor) -> Tensor:
    return F.batch_norm(F.conv2d(x, w), mean, var, factor)


def scaled_and_shifted(x: Tensor, w: Tensor, bias: Tensor, c: Tensor) -> Tensor:
    return F.linear(x, w, bias) * c + 1


def gated(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ v) * (x @ w)


def there_and_back(x: Tensor) -> Tensor:
    return x.double().view(3, 2).relu().float()


def linear_of_integers(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
    y = F.linear(dequantized(x), dequantized_weight(w, scales), bias)
    return requantized(y.relu(), torch.uint8)


def convolution_of_integers(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.conv2d(dequantized(x), dequantized_weight(w, scales)).relu()


def weight_of_integers(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return torch.mm(x, w.t().to(x.dtype)) * scales


def whole_numbers(*size: int) -> Callable[[], tuple[Tensor, ...]]:
    """Bytes, and a weight for them with its scales and a bias."""
    return lambda: (integers(torch.uint8, 2, *size), *weight_of(4, *size), torch.randn(4))


def floats(*sizes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Arguments of these sizes."""
    return lambda: tuple(torch.randn(size) for size in sizes)


CAPTURED: Final = (  # over the graph of torch functions
    Example(normalize_keywords, numpy_keywords, floats((2, 3))),
    Example(settle_dropout, dropout_at_both_ends, floats((2, 3))),
    Example(
        spell_dropout,
        lambda x: F.dropout(x, 0.25),
        floats((2, 3)),
        options=Options(numerics="eager"),
    ),
    Example(fuse_attention, attention, floats((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), (5, 5))),
)
JOINT: Final = (  # over a graph of ATen operators, forward and backward
    Example(share_forward, the_same_twice, lambda: (torch.randn(2, 3, requires_grad=True),)),
)
TRACED: Final = (  # over a graph of ATen operators
    Example(drop_noops, views_and_copies, floats((2, 3))),
    Example(
        spell_softmax,
        lambda x: torch.log_softmax(x, 1),
        floats((2, 3)),
        options=Options(codegen="triton"),
    ),
    Example(fold_uniform, ones_and_zeros, floats((2, 3))),
    Example(narrow_indices, pooled_and_back, floats((1, 1, 12, 12), (1, 1, 6, 6))),
    Example(pad_mm, shallow_product, floats((1024, 16), (16, 301))),
    Example(channels_last, convolutions, floats((2, 3, 9, 8), (3, 3, 3, 3))),
    Example(unroll_foreach, lists, floats((2, 3), (4,))),
    Example(share_subexpressions, the_same_twice, floats((2, 3))),
    Example(cancel_cat_split, cats_and_splits, floats((4, 3), (2, 3))),
    Example(fold_cumsum, running_sum, floats()),
    Example(write_in_place, written_to, floats((2, 3))),
    Example(
        linear_to_onednn,
        large_linear,
        floats((16, DEPTH), (LARGE_WEIGHT // DEPTH, DEPTH), (LARGE_WEIGHT // DEPTH,)),
    ),
    Example(fuse_conv_activation, activated_image, floats((1, 3, 64, 64), (64, 3, 3, 3), (64,))),
    Example(add_into_convolution, added_images, floats((1, 3, 8, 8), (3, 3, 1, 1), (3, 3, 1, 1))),
    Example(drop_casts, there_and_back, floats((2, 3))),
    Example(
        fold_batch_norm,
        normalized_image,
        floats((1, 3, 8, 8), (4, 3, 3, 3), (4,), (4,), (4,)),
        weights=(1, 2, 3, 4),
    ),
    Example(fold_binary, scaled_and_shifted, floats((2, 3), (4, 3), (4,), (4,)), weights=(1, 2, 3)),
    Example(int8_linear, linear_of_integers, whole_numbers(3), weights=(1, 2, 3)),
    Example(
        int8_convolution,
        convolution_of_integers,
        lambda: whole_numbers(3, 2, 2)()[:3],
        weights=(1, 2),
    ),
    Example(
        int8_weight_only,
        weight_of_integers,
        lambda: (
            torch.randn(2, 32).bfloat16(),
            integers(torch.int8, 4, 32),
            torch.rand(4).bfloat16(),
        ),
    ),
    Example(join_linears, gated, floats((2, 3), (3, 4), (3, 4)), weights=(1, 2)),
    Example(pack_linear, large_linear, floats((16, 256), (512, 256), (512,)), weights=(1, 2)),
    Example(
        pack_convolution,
        halved_and_doubled,
        floats((1, 3, 8, 8), (4, 3, 2, 2), (4, 3, 2, 2)),
        weights=(1, 2),
    ),
    Example(
        pack_lstm,
        remembered,
        floats((5, 2, 3), (1, 2, 4), (16, 3), (16, 4)),
        weights=(2, 3),
    ),
    Example(drop_vectors, torch.linalg.svdvals, floats((3, 3))),
    Example(hold_to_promise, foretold, floats((2, 3))),
    Example(seed_random, random_numbers, floats((2, 3))),
    Example(reorder_for_memory, sums_of_products, floats((8, 8), (8, 8), (8, 8))),
)
