"""Where the extremes are, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.fused import FLOATS, TYPES, check_fused
from tests.ops.layouts import LAYOUTS, odd_values, plain


def along(x: Tensor) -> list[Any]:
    """Every operator; along every dimension, kept and gone."""
    return [
        *x.max(0),
        *x.min(-1, True),
        *x.min(1),
        *([] if x.dtype is torch.bool else [x.argmax(1, True), x.argmin(0), x.argmax(-1)]),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Every dimension of every layout."""
    check_fused(along, LAYOUTS[layout](), grad=False)


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Many elements are equal: the first one counts."""
    check_fused(along, plain(5, 6, 20, dtype=torch.int64).div(3).trunc().to(dtype), grad=False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_values(dtype: torch.dtype) -> None:
    """The first NaN is the extreme."""

    def reduce(x: Tensor) -> Any:
        return [*x.max(1), *x.min(1), *x.max(0), *x.min(0), x.argmax(), x.argmin(), x.argmax(1)]

    check_fused(reduce, odd_values(dtype))


def test_all_elements() -> None:
    """The index counts in row-major order, whatever the layout."""

    def reduce(x: Tensor) -> Any:
        return x.argmax(), x.argmin(), x.argmax(keepdim=True)

    for x in (plain(), plain(1), plain(6, 7), plain(6, 7).mT, plain(1, 3).expand(4, 3)):
        check_fused(reduce, x)
    check_fused(reduce, plain(400, 500))


def test_one_number() -> None:
    """A tensor without dimensions has index 0."""
    check_fused(lambda x: [*x.max(0), *x.min(-1, True), x.argmax(0)], plain())


def test_gradients() -> None:
    """They go to the element that was found."""
    check_fused(
        lambda x: (x.max(1).values, x.min(0, True).values),
        plain(5, 7).requires_grad_(),
        stays=("scatter",),
    )


def test_symbolic_sizes() -> None:
    """Indices within sizes that only the call knows."""
    check_fused(along, plain(4, 5, 6), dynamic=True)
