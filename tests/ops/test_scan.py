"""Running sums, products and extremes, against eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.fused import FLOATS, INTEGERS, TYPES, check_fused
from tests.ops.layouts import LAYOUTS, odd_values, plain


def along(x: Tensor) -> list[Any]:
    """Every operator, along every dimension."""
    found: list[Any] = []
    for dim in (0, 1, -1):
        found += [x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Along every dimension of every layout."""
    check_fused(along, LAYOUTS[layout]())


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Sums and products of integers are int64."""
    if dtype is torch.bool:
        check_fused(lambda x: (x.cumsum(0), x.cumprod(1)), plain(5, 6, dtype=dtype))
    else:
        check_fused(along, plain(3, 5, 6, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_values(dtype: torch.dtype) -> None:
    """NaN stays once it was met."""
    check_fused(
        lambda x: (x.cumsum(1), x.cumprod(1), *x.cummax(1), *x.cummin(1), *x.cummax(0)),
        odd_values(dtype),
    )


def test_one_number() -> None:
    """A tensor without dimensions."""
    check_fused(lambda x: (x.cumsum(0), x.cumprod(-1)), plain())
    check_fused(lambda x: x.cumsum(0), plain(dtype=torch.int32))


def test_given_result_types() -> None:
    """Elements are converted before they are combined."""

    def scans(x: Tensor, n: Tensor) -> Any:
        return (
            x.cumsum(0, dtype=torch.float64),
            x.cumsum(0, dtype=torch.int64),
            n.cumsum(0, dtype=torch.uint8),
            n.cumprod(0, dtype=torch.float32),
        )

    check_fused(scans, plain(9) * 5, plain(9, dtype=torch.int32) * 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_are_as_exact_as_eagers(dtype: torch.dtype) -> None:
    """Of one sign, where errors would add up."""
    check_fused(lambda x: (x.cumsum(0), x.cumsum(1)), torch.rand(3000, 2).to(dtype))


def test_gradients() -> None:
    """Sums from the other end."""
    check_fused(
        lambda x: (x.cumsum(0), x.cumsum(-1), x.flip(0).cumsum(0)), plain(5, 6).requires_grad_()
    )


def test_between_others() -> None:
    """A scan computes what it reads, and is read in turn."""

    def program(x: Tensor) -> Any:
        total = (x.exp() * 2).cumsum(-1)
        return total / total[..., -1:], (x > 0).cumsum(-1) * x, x.softmax(-1).cumsum(-1)

    check_fused(program, plain(6, 30))


def test_symbolic_sizes() -> None:
    """Lengths that only the call knows."""
    check_fused(lambda x: (x.cumsum(0), x.cumprod(-1), *x.cummax(1)), plain(6, 7), dynamic=True)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_masks_as_positions(dtype: torch.dtype) -> None:
    """Positions among what is not masked, as tokenizers count them."""
    check_fused(lambda m: m.cumsum(-1) * m - 1, plain(4, 20, dtype=dtype) != 0)
