"""Layouts: transposed, sliced, expanded and channels-last operands, and results that alias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, check, randn


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((64, 64), torch.float32),
        ((129, 65), torch.bfloat16),
        ((129, 65), torch.int8),
        ((1, 300), torch.float32),
        ((1000, 3), torch.float32),
    ],
    ids=str,
)
def test_a_transposed_read_beside_a_plain_one(size: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = (randn(*size) * 10).to(dtype), (randn(*size[::-1]) * 10).to(dtype)

    check(lambda x, y: x.t() + y, x, y)


def test_permutations() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [
            x.permute(3, 1, 0, 2).contiguous() + 1,
            x.transpose(1, 2).reshape(x.shape[0], -1) * 2,
            x.movedim(0, -1).exp().contiguous(),
            x.permute(0, 2, 3, 1) * 3,
        ]

    check(formulas, randn(3, 17, 5, 33, grad=True))


def test_slices_flips_and_rolls() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [
            x[1:-1, ::3] * 2,
            x.flip(0, 1) + x,
            x.roll((3, -2), (0, 1)) - x,
            x[:, -1:] + x[:1],
            x.unfold(1, 5, 2).sum(-1),
            x.diagonal() + 1,
        ]

    check(formulas, randn(40, 41, grad=True))


def test_joined_split_and_stacked() -> None:
    def formulas(x: Tensor, y: Tensor) -> list[Tensor]:
        one, two = x.chunk(2, -1)
        return [
            torch.cat((-two, one, y), -1) * 2,
            torch.stack((x, x + 1), 1).relu(),
            torch.cat((x, x[:3])).sum(0),
            F.pad(x, (1, 2, 3, 0), value=0.5),
            F.pad(x[None], (2, 3), mode="reflect"),
            x.repeat(2, 3) + 1,
        ]

    check(formulas, randn(33, 64, grad=True), randn(33, 7, grad=True))


def test_operands_that_lie_apart() -> None:
    base = randn(100, 200)

    check(lambda x: x * 2 + 1, base[::2, 1::3])
    check(lambda x: (x * 2).sum(-1), base.t()[5:, :7])
    check(lambda x, y: x + y, base[:, :1].expand(100, 200), base)
    check(lambda x: x.exp(), base.as_strided((50, 30), (3, 5), 7))


def test_channels_last_stays() -> None:
    x = randn(4, 16, 9, 11).to(memory_format=torch.channels_last)

    check(lambda x: F.silu(x) + 1, x)
    check(nn.Conv2d(16, 8, 3, padding=1).to(DEVICE), x.requires_grad_())


def test_views_that_leave_the_graph() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [y, y.t(), y[3:], x.view(-1), x[None]]

    check(formulas, randn(12, 13))


def test_views_as_other_types() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [x.view(torch.int32) + 1, (x * 2).view(torch.int32), x.view(torch.int32) & 0xFF]

    check(formulas, randn(64, 8))


def test_pooling_and_resizing() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [
            F.max_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
            F.interpolate(x, scale_factor=2, mode="nearest"),
            F.interpolate(x, size=(15, 9), mode="bilinear"),
        ]

    check(formulas, randn(2, 5, 16, 18, grad=True), tolerance_scale=4.0)
