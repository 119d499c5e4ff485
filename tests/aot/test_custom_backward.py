"""Derivatives that are the user's own, where only some outputs are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stator.errors import StatorWarning
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


class Counts(torch.autograd.Function):
    """Its derivative adds to one of its inputs, as those of quantized types do to their scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        ctx.count.add_(grad.sum())
        return grad * 2 * x.cos() * ctx.count, None


def counted(x: Tensor, count: Tensor) -> Tensor:
    return Counts.apply(x, count).sin()


def through_a_view(x: Tensor, count: Tensor) -> Tensor:
    return counted(x, count.view(1)[0])


@pytest.mark.parametrize("fn", [counted, through_a_view])
def test_what_a_backward_writes_to_an_input_is_there_behind_it(fn: Any) -> None:
    def run(program: Any) -> tuple[Tensor, ...]:
        x, count = torch.arange(4.0, requires_grad=True), torch.ones(())
        steps = [program(x, count) for _ in range(2)]  # both forwards before the first backward
        before = count.clone()
        for step in steps:
            step.sum().backward()
        assert x.grad is not None
        return before, count, x.grad

    compiled = torch.compile(fn, backend="stator", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(run(compiled), run(fn))


def test_an_input_that_both_write_to_is_left_to_eager() -> None:
    def both(x: Tensor, count: Tensor) -> Tensor:
        with torch.no_grad():
            count.mul_(3)
        return counted(x, count)

    x, count = torch.arange(4.0, requires_grad=True), torch.ones(())
    compiled = torch.compile(both, backend="stator", fullgraph=True)
    with pytest.warns(StatorWarning, match="that the forward writes to"):
        compiled(x, count).sum().backward()

    assert count > 3
