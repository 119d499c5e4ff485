"""Norms, softmax and cross entropy, forward and backward, one pass or many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, FLOATS, check, integers, randn, several

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
# A block holds the row, or several do; each dtype once.
each_width = pytest.mark.parametrize(
    ("width", "dtype"),
    [(33, torch.float32), (1024, torch.bfloat16), (4096, torch.float16), (12288, torch.bfloat16)],
    ids=str,
)


@each_width
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    weight, bias = randn(width, dtype=dtype, grad=True), randn(width, dtype=dtype, grad=True)

    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias)

    check(normed, randn(several(19, 5), width, dtype=dtype, grad=True), weight, bias)


@each_width
def test_rms_norm_of_a_sum(width: int, dtype: torch.dtype) -> None:
    def normed(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        wide = total if total.dtype is torch.float64 else total.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * scaled.to(x.dtype), total

    rows = several(19, 5)
    x, residual = (randn(rows, width, dtype=dtype, grad=True) for _ in range(2))
    check(normed, x, residual, randn(width, dtype=dtype, grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_group_and_instance_norm(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True))

    check(module.to(DEVICE, dtype), randn(3, 16, 9, 11, dtype=dtype, grad=True))


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_batch_norm_and_its_statistics(train: bool) -> None:
    module = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU()).to(DEVICE).train(train)

    check(module, randn(several(8, 2), 24, 13, 15, grad=True), calls=2)


@each_float
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_softmax(dim: int, dtype: torch.dtype) -> None:
    x = randn(several(17, 5), several(50, 12), 129, dtype=dtype, grad=True)

    check(lambda x: (torch.softmax(x, dim), torch.log_softmax(x, dim)), x)


@pytest.mark.parametrize("width", [8, 4096, 50257])
def test_softmax_of_rows(width: int) -> None:
    check(lambda x: torch.softmax(x * 3, -1), randn(9, width, dtype=torch.bfloat16, grad=True))


def test_softmax_of_large_numbers_and_of_hidden_rows() -> None:
    x = randn(6, 100) * 1e4
    x[2] = -float("inf")  # NaN, as in eager
    x[3, 1:] = -float("inf")
    x[4, 7] = float("inf")

    check(lambda x: (torch.softmax(x, -1), torch.log_softmax(x, -1), x.logsumexp(-1)), x)


def test_masked_softmax() -> None:
    hidden = torch.ones(40, 40, dtype=torch.bool, device=DEVICE).triu(1)

    def masked(scores: Tensor, hidden: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(hidden, float("-inf")) * 0.1, -1)

    check(masked, randn(2, 3, 40, 40, grad=True), hidden)


@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [(64, 10, torch.float32), (33, 32000, torch.float32), (700, 50257, torch.bfloat16)],
    ids=str,
)
def test_cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide, target)

    check(loss, randn(rows, classes, dtype=dtype, grad=True), integers(classes, rows))


def test_cross_entropy_with_all_that_it_takes() -> None:
    target = integers(50, 128)
    target[::5] = -100

    def losses(logits: Tensor, target: Tensor, weight: Tensor) -> list[Tensor]:
        return [
            F.cross_entropy(logits, target),
            F.cross_entropy(logits, target, weight),
            F.cross_entropy(logits, target, label_smoothing=0.1),
            F.cross_entropy(logits, target, reduction="none"),
            F.cross_entropy(logits, target, reduction="sum"),
        ]

    check(losses, randn(128, 50, grad=True), target, torch.rand(50, device=DEVICE))


def test_cross_entropy_of_nothing_but_padding() -> None:
    target = torch.full((8,), -100, device=DEVICE)

    check(loss_of, randn(8, 5, grad=True), target)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """A frame of ours: Dynamo does not begin in one of torch's."""
    return F.cross_entropy(logits, target)
