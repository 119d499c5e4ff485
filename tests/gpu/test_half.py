"""Half precision: unrounded within a formula, as memory would hold it where it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.gpu.on_device import compiled, randn

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _lost(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x - x.to(dtype).float()


def _lost_by_a_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x - torch.empty_like(x, dtype=dtype).copy_(x)


def _lost_by_a_product(x: Tensor, dtype: torch.dtype) -> Tensor:
    half = x.to(dtype)
    return half.float() * half.float() - (half * half).float()


LOST: Final[dict[str, Callable[[Tensor, torch.dtype], Tensor]]] = {
    "conversion": _lost,
    "copy": _lost_by_a_copy,
    "product": _lost_by_a_product,
}


@each_half
@pytest.mark.parametrize("name", LOST)
def test_what_a_conversion_loses_is_lost(name: str, dtype: torch.dtype) -> None:
    """Splitting a number in two, feeding an error back, compensated sums: all are made of it."""
    x = randn(40, 30)

    found = compiled(lambda x: LOST[name](x, dtype))(x)

    assert torch.equal(found, LOST[name](x, dtype))
    assert found.count_nonzero() > 1000


@each_half
def test_the_largest_of_a_formula_is_found(dtype: torch.dtype) -> None:
    """All of it in pieces, whose largest are compared with what another kernel stored."""
    a, b, c = (randn(512, 2048, dtype=dtype) for _ in range(3))

    def formula(a: Tensor, b: Tensor, c: Tensor) -> Any:
        y = a.sin() * b + c
        return y, y.argmax(), (y == y.max()).sum()

    y, place, count = compiled(formula)(a, b, c)

    assert y.flatten()[place] == y.max()
    assert count == (y == y.max()).sum()


@each_half
@pytest.mark.parametrize("largest", [lambda x: x.amax(-1), lambda x: x.max()], ids=["row", "all"])
def test_the_largest_element_gets_the_gradient(
    largest: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The backward computes the product again, and looks for the largest that the forward kept."""
    x, w = randn(64, 300, dtype=dtype, grad=True), randn(300, dtype=dtype, grad=True)
    twin = x.detach().clone().requires_grad_()

    compiled(lambda x, w: largest(x * w))(x, w).sum().backward()

    largest(twin * w).sum().backward()
    assert torch.equal(x.grad, twin.grad)
