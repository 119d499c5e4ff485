"""Gathers and scatters: repeated places, whole and half numbers, backward of lookups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, check, integers, randn

each_float = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@each_float
def test_lookups_by_row_and_by_element(dtype: torch.dtype) -> None:
    def formulas(x: Tensor, rows: Tensor, places: Tensor) -> list[Tensor]:
        return [
            x[rows] * 2,
            x.index_select(0, rows),
            x.gather(1, places),
            x[rows, rows % x.shape[1]],
            torch.take_along_dim(x, places, 1),
        ]

    x = randn(40, 30, dtype=dtype, grad=True)
    check(formulas, x, integers(40, 200), integers(30, 40, 9))


def test_negative_places() -> None:
    check(lambda x, i: x[i] + 1, randn(10, 4, grad=True), integers(10, 33, low=-10))


@each_float
def test_repeated_places_are_added(dtype: torch.dtype) -> None:
    def formulas(x: Tensor, index: Tensor, values: Tensor) -> list[Tensor]:
        column = index[:, None].expand_as(values)
        return [
            x.index_add(0, index, values),
            x.scatter_add(0, column, values),
            x.index_put((index,), values, accumulate=True),
        ]

    x, values = randn(7, 65, dtype=dtype, grad=True), randn(300, 65, dtype=dtype, grad=True)
    # Eager adds in an order that changes from run to run, each sum rounded.
    check(formulas, x, integers(7, 300), values, tolerance_scale=4.0)


def test_whole_numbers_are_added() -> None:
    def formula(x: Tensor, index: Tensor) -> Tensor:
        return x.scatter_add(0, index, torch.ones_like(index))

    check(formula, integers(5, 11), integers(11, 5000))
    check(formula, integers(5, 11, dtype=torch.int64), integers(11, 5))


def test_places_are_written() -> None:
    def formulas(x: Tensor, rows: Tensor, values: Tensor) -> list[Tensor]:
        return [
            x.index_copy(0, rows, values),
            x.index_put((rows,), values),
            x.scatter(0, rows[:, None].expand_as(values), values),
            x.masked_fill(x > 0, 0.5),
            x.select_scatter(values[0], 0, 3),
            x.slice_scatter(values[:4], 0, 2, 6),
        ]

    rows = torch.randperm(20, device=DEVICE)[:9]
    check(formulas, randn(20, 33, grad=True), rows, randn(9, 33, grad=True))


@pytest.mark.parametrize("reduce", ["amax", "amin", "mean", "prod"])
def test_scatter_reduce(reduce: str) -> None:
    def formula(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return x.scatter_reduce(0, index, values, reduce, include_self=False)

    check(formula, randn(9), integers(9, 100), randn(100), tolerance_scale=4.0)


@each_float
def test_embedding_and_its_backward(dtype: torch.dtype) -> None:
    def looked_up(tokens: Tensor, weight: Tensor, places: Tensor) -> Tensor:
        return F.embedding(tokens, weight, padding_idx=0) + places[: tokens.shape[1]]

    weight, places = randn(50, 64, dtype=dtype, grad=True), randn(40, 64, dtype=dtype, grad=True)
    check(looked_up, integers(50, 8, 33), weight, places, tolerance_scale=4.0)


def test_one_hot_and_counts() -> None:
    check(
        lambda t: (F.one_hot(t, 12), (t[:, None] == torch.arange(12, device=t.device)).sum(0)),
        integers(12, 200),
    )


def test_masks_of_positions() -> None:
    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        columns = torch.arange(x.shape[1], device=x.device)
        return torch.where(columns <= rows, x, -1e9), x.tril() + x.triu(2)

    check(formula, randn(33, 70, grad=True))
