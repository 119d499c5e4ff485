"""Reductions: rows that fit a block and rows that do not, columns, everything; each dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, FLOATS, check, integers, randn

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def over_last(x: Tensor) -> list[Tensor]:
    return [x.sum(-1), x.mean(-1, keepdim=True), x.amax(-1), x.var(-1), x.logsumexp(-1)]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((1000, 7), torch.float32),
        ((64, 1024), torch.bfloat16),
        ((5, 4097), torch.float32),
        ((2, 70001), torch.float16),
        ((2, 70001), torch.float32),
    ],
    ids=str,
)
def test_rows(size: tuple[int, int], dtype: torch.dtype) -> None:
    check(over_last, randn(*size, dtype=dtype))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((7, 1000), torch.bfloat16),
        ((4096, 96), torch.float32),
        ((70001, 2), torch.float32),
        ((513, 33), torch.float16),
    ],
    ids=str,
)
def test_columns(size: tuple[int, int], dtype: torch.dtype) -> None:
    check(lambda x: [x.sum(0), x.mean(0), x.amin(0), x.std(0)], randn(*size, dtype=dtype))


@each_float
def test_everything(dtype: torch.dtype) -> None:
    for count in (1, 1000, (1 << 20) + 5):
        check(lambda x: [x.sum(), x.mean(), x.amax(), (x > 0).sum()], randn(count, dtype=dtype))


@pytest.mark.parametrize("dims", [(1,), (0, 2), (1, 3), (0, 1, 2, 3)], ids=str)
def test_axes_between(dims: tuple[int, ...]) -> None:
    check(lambda x: [x.sum(dims), x.square().mean(dims), x.amax(dims)], randn(6, 17, 5, 33))


def test_gradients() -> None:
    def formula(x: Tensor) -> Tensor:
        return x.sum(0) + x.mean() + x.amax(-1)[:33] + x.var(0) + x.logsumexp(0)

    check(formula, randn(65, 33, grad=True))


def test_whole_numbers_and_flags() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        flags = x > 0
        return [x.sum(-1), x.amax(0), flags.any(-1), flags.all(0), flags.sum(), x.prod(-1)]

    check(formulas, integers(4, 129, 21, low=-3))
    check(formulas, integers(4, 129, 21, low=-3, dtype=torch.int32))


def test_the_first_of_equal_ones_is_found() -> None:
    x = integers(5, 300, 77).float()

    check(lambda x: [x.argmax(-1), x.argmin(0), x.argmax()], x)
    check(lambda x: list(x.max(-1)), randn(300, 77, grad=True))


@pytest.mark.parametrize("reduce", [torch.amax, torch.argmax, torch.sum], ids=lambda f: f.__name__)
def test_nan_wins(reduce: Callable[..., Tensor]) -> None:
    x = randn(8, 1000)
    x[3, 500] = float("nan")
    x[5, 20] = float("inf")

    check(lambda x: reduce(x, -1), x)


def test_sums_are_as_exact_as_eagers() -> None:
    """Many terms of one sign: what is added one by one in float32 loses digits."""
    x = torch.rand(3, 1 << 20, device=DEVICE)

    check(lambda x: [x.sum(-1), x.sum(), x.mean()], x)
    check(lambda x: [x.sum(0)], x.t().contiguous())


def test_a_reduction_between_formulas() -> None:
    def formula(x: Tensor, weight: Tensor) -> Tensor:
        scaled = F.gelu(x) * weight
        return (scaled - scaled.mean(-1, keepdim=True)).square().sum(0).sqrt()

    check(formula, randn(200, 300, grad=True), randn(300, grad=True))


def test_of_a_transposed_and_of_a_sliced_tensor() -> None:
    x = randn(128, 200)

    check(lambda x: [x.sum(-1), x.sum(0)], x.t())
    check(lambda x: [x.sum(-1), x.amax(0)], x[3::2, ::3])
