"""Running sums and sorting: along rows and columns, short and long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.on_device import check, integers, randn


@pytest.mark.parametrize(
    ("size", "dim"), [((64, 100), 1), ((100, 65), 0), ((3, 70001), 1), ((2, 5, 33), 1)], ids=str
)
def test_running_sums(size: tuple[int, ...], dim: int) -> None:
    check(lambda x: x.cumsum(dim), randn(*size, grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_running_sums_of_other_types(dtype: torch.dtype) -> None:
    check(lambda x: x.cumsum(-1), integers(9, 40, 1000, low=-9).to(dtype))


def test_running_products_maxima_and_logarithms() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [(1 + 0.01 * x).cumprod(-1), *x.cummax(-1), x.logcumsumexp(-1)]

    check(formulas, randn(31, 257))


def test_a_running_sum_between_formulas() -> None:
    def formula(x: Tensor) -> Tensor:
        return (x.exp().cumsum(-1) / (1 + x.square()).sum(-1, keepdim=True)).tanh()

    check(formula, randn(50, 300, grad=True))


def test_sorting() -> None:
    def formulas(x: Tensor) -> list[Tensor]:
        return [*x.sort(-1, stable=True), *x.topk(5, -1), x.argsort(0, stable=True)]

    check(formulas, randn(20, 133))
