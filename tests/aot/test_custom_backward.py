"""Derivatives that are the user's own, where only some outputs are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity import check


class NotLinear(torch.autograd.Function):
    """Its derivative does not vanish where the gradient of the first output does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 3, x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, second = grads
        return first.cos() + second


class Broadcast(torch.autograd.Function):
    """Its derivative adds gradients of two sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(0), x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, second = grads
        return first + second


def test_an_unused_output_brings_zeros_to_a_derivative_that_is_not_linear() -> None:
    check(lambda x: NotLinear.apply(x)[1] * 2, torch.randn(3, requires_grad=True))


def test_an_output_that_the_caller_leaves_alone_brings_zeros_too() -> None:
    def use(fn: Any, x: Tensor) -> Tensor:
        _, second = fn(x)
        return second * 2

    check(NotLinear.apply, torch.randn(3, requires_grad=True), use=use)


def test_a_gradient_keeps_its_size_where_the_larger_summand_is_missing() -> None:
    def use(fn: Any, x: Tensor) -> Tensor:
        first, _ = fn(x)
        return first * 2

    check(Broadcast.apply, torch.randn(2, 3, requires_grad=True), use=use)
