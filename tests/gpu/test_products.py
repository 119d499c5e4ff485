"""Products, convolutions and attention: what the libraries compute, and what is fused around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, check, randn

each_float = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@each_float
@pytest.mark.parametrize("size", [(64, 32, 48), (31, 15, 17), (1, 64, 64)], ids=str)
def test_products_with_formulas_around_them(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = size

    def formula(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.gelu(F.linear(x.tanh(), weight, bias)) + residual

    check(
        formula,
        randn(rows, inner, dtype=dtype, grad=True),
        randn(columns, inner, dtype=dtype, grad=True),
        randn(columns, dtype=dtype, grad=True),
        randn(rows, columns, dtype=dtype, grad=True),
    )


def test_batched_transposed_and_expanded_products() -> None:
    def formulas(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [
            x @ y,
            x.transpose(1, 2) @ x,
            torch.bmm(x, y).relu(),
            torch.einsum("bij,bjk->bk", x, y),
            x @ z,
            torch.baddbmm(x @ y, x, y, beta=0.5, alpha=2.0),
        ]

    check(formulas, randn(5, 24, 40, grad=True), randn(5, 40, 16, grad=True), randn(40, grad=True))


@each_float
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_attention(dtype: torch.dtype, causal: bool) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    q, k, v = (randn(2, 4, 64, 32, dtype=dtype, grad=True) for _ in range(3))
    check(attended, q, k, v)


@each_float
def test_attention_written_out(dtype: torch.dtype) -> None:
    hidden = torch.ones(48, 48, dtype=torch.bool, device=DEVICE).triu(1)

    def attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v

    q, k, v = (randn(2, 4, 48, 32, dtype=dtype, grad=True) for _ in range(3))
    check(attended, q, k, v, hidden)


@each_float
def test_a_convolution_with_batch_norm(dtype: torch.dtype) -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    ).to(DEVICE, dtype)

    check(module, randn(4, 3, 20, 22, dtype=dtype, grad=True))
    check(module.eval(), randn(4, 3, 20, 22, dtype=dtype))


def test_other_convolutions() -> None:
    modules = nn.ModuleList(
        [
            nn.Conv2d(8, 8, 3, groups=8, padding=1),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Conv2d(8, 6, 3, dilation=2),
        ]
    ).to(DEVICE)

    for module in modules:
        check(module, randn(2, 8, 11, 12, grad=True))
    check(nn.Conv1d(8, 6, 3, padding=1).to(DEVICE), randn(2, 8, 33, grad=True))
