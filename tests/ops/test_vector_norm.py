"""Norms of vectors, against eager and float64."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.ops.fused import FLOATS, check_fused
from tests.ops.layouts import DIMS, LAYOUTS, odd_values, plain

ORDERS: Final = (0, 1, 2, 3, 0.5, 2.5, -1, -2, math.inf, -math.inf)


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: float) -> None:
    """Every order over every set of dimensions, with gradients."""

    def norms(x: Tensor) -> list[Any]:
        return [torch.linalg.vector_norm(x, order, dims, True) for dims in DIMS]

    check_fused(norms, (plain(4, 5, 6) + 0.1).requires_grad_())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Every set of dimensions of every layout."""

    def norms(x: Tensor) -> list[Any]:
        return [torch.linalg.vector_norm(x, order, dims) for dims in DIMS[:4] for order in (2, 3)]

    check_fused(norms, LAYOUTS[layout]())


@pytest.mark.parametrize("dtype", FLOATS)
def test_types(dtype: torch.dtype) -> None:
    """Halves are widened; a wider result may be asked for."""

    def norms(x: Tensor) -> list[Any]:
        wide = torch.linalg.vector_norm(x, 2, 1, dtype=torch.float64)
        return [torch.linalg.vector_norm(x, order, 1) for order in ORDERS] + [wide, x.norm()]

    check_fused(norms, plain(7, 60, dtype=dtype))


def test_odd_values() -> None:
    """NaN, infinities and zeros go through as in eager."""
    check_fused(lambda x: [torch.linalg.vector_norm(x, p, 1) for p in ORDERS], odd_values())


def test_one_element_does_not_overflow() -> None:
    """Its size, not the root of its square."""

    def norms(x: Tensor, y: Tensor) -> list[Any]:
        return [torch.linalg.vector_norm(v, order) for v in (x, y) for order in (0, 1, 2, 3)]

    check_fused(norms, torch.tensor(-1e30), torch.tensor([[3e25]]))


def test_other_spellings() -> None:
    """torch.norm, distances, normalization."""

    def norms(x: Tensor, y: Tensor) -> Any:
        return (
            torch.norm(x),
            torch.norm(x, 1),
            torch.norm(x, "fro", (0, 1)),
            torch.norm(x, 3, 0, True, dtype=torch.float64),
            torch.dist(x, y),
            torch.dist(x, y[:1], 1),
            nn.functional.normalize(x),
            nn.functional.normalize(x, 1.0, 0),
            nn.functional.pairwise_distance(x, y),
            nn.functional.cosine_similarity(x, y),
            torch.ops.aten.norm.Scalar(x, 2),
            torch.ops.aten.norm.ScalarOpt_dtype(x, None, dtype=torch.float64),
            torch.ops.aten.norm.ScalarOpt_dim_dtype(x, 1, [0], False, dtype=torch.float64),
        )

    check_fused(norms, plain(5, 7).requires_grad_(), plain(5, 7).requires_grad_())


def test_renorm() -> None:
    """Only what is too long is shortened."""
    for order in (1, 2, math.inf):
        check_fused(lambda x, p=order: torch.renorm(x, p, 0, 2.0), plain(6, 5).requires_grad_())
        check_fused(lambda x, p=order: torch.renorm(x, p, -1, 2.0), plain(6, 5, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dtype: torch.dtype, dim: int) -> None:
    """Direction and length of weights, with gradients of both."""
    sizes = [1, 1, 1]
    sizes[dim] = (4, 5, 6)[dim]
    g, v = plain(*sizes, dtype=dtype), plain(4, 5, 6, dtype=dtype)  # in this order: v is then
    # not what the check draws for the gradient, which would leave v nothing
    check_fused(lambda v, g: torch._weight_norm(v, g, dim), v.requires_grad_(), g.requires_grad_())


def test_symbolic_sizes() -> None:
    """Sizes that only the call knows."""
    check_fused(
        lambda x: (x.norm(dim=0), x.norm(3), torch.renorm(x, 2, 0, 1.0)), plain(7, 9), dynamic=True
    )
