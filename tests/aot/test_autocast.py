"""Autocast: casts where eager casts, in forward and backward, and the mode left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity import check, compiled


def autocast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def mix(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) + x.sum()


def under_autocast(fn: Callable[..., Any], *inputs: Any) -> Any:
    with autocast():
        return fn(*inputs)


def matrices(requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4, requires_grad=requires_grad), torch.randn(
        4, 4, requires_grad=requires_grad
    )


def test_autocast_inside_the_function_casts_as_in_eager() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with autocast():
            y = x @ w
        return y, x @ w

    check(fn, *matrices())


def test_autocast_around_the_call_casts_as_in_eager() -> None:
    check(mix, *matrices(), use=under_autocast)


def test_autocast_in_inference_casts_as_in_eager() -> None:
    with torch.no_grad():
        check(mix, *matrices(requires_grad=False), use=under_autocast)


def test_float16_is_cast_to_as_well() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with autocast(torch.float16):
            return x @ w

    check(fn, *matrices())


def test_a_region_without_autocast_inside_one_is_left_alone() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with autocast():
            y = x @ w
            with autocast(enabled=False):
                z = x @ w
            return y, z

    check(fn, *matrices())


def test_autocast_switched_off_inside_a_call_under_it_is_obeyed() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with autocast(enabled=False):
            return x @ w

    check(fn, *matrices(), use=under_autocast)


def test_gradients_come_back_in_the_dtype_of_the_parameters() -> None:
    layer = nn.Linear(4, 3)

    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        with autocast():
            out = fn(x)
        assert out.dtype == torch.bfloat16
        return out

    x = torch.randn(2, 4, requires_grad=True)
    check(layer, x, use=use, precision=torch.bfloat16)
    with autocast():
        out = compiled(layer)(torch.randn(2, 4))
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_backward_under_autocast_gives_what_eager_gives() -> None:
    def use(fn: Callable[..., Any], x: Tensor, w: Tensor) -> Any:
        with autocast():
            return torch.autograd.grad(fn(x, w).sum(), (x, w))

    check(mix, *matrices(), use=use)


def test_a_model_trains_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    check(model, torch.randn(3, 4), use=under_autocast, calls=2)


def test_a_convolution_trains_under_autocast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    check(model, torch.randn(2, 3, 6, 6), use=under_autocast)


def test_attention_trains_under_autocast() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    check(fn, *(torch.randn(1, 2, 4, 8, requires_grad=True) for _ in "qkv"), use=under_autocast)


def test_losses_that_need_float32_get_it() -> None:
    def fn(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x @ w, target)

    check(fn, *matrices(), torch.tensor([0, 1, 2, 3]), use=under_autocast)


def test_float64_is_not_cast() -> None:
    x, w = (matrix.detach().double().requires_grad_() for matrix in matrices())
    check(mix, x, w, use=under_autocast)


def test_one_function_serves_calls_with_and_without_autocast() -> None:
    call = compiled(torch.mm)
    x, w = matrices(requires_grad=False)
    assert call(x, w).dtype == torch.float32
    with autocast():
        assert call(x, w).dtype == torch.bfloat16
    with autocast(torch.float16):
        assert call(x, w).dtype == torch.float16
    assert call(x, w).dtype == torch.float32


@pytest.mark.parametrize("around", [False, True], ids=["outside", "inside"])
def test_the_mode_is_left_as_it_was(around: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with autocast(torch.float16):
            return x @ w

    x, w = matrices()
    with autocast(enabled=around):
        compiled(fn)(x, w).sum().backward()
        assert torch.is_autocast_enabled("cpu") == around
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_a_cast_weight_used_twice_gets_both_gradients() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with autocast():
            return (x @ w) @ w

    check(fn, *matrices())


def test_a_function_of_the_users_own_sees_autocast_in_forward() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad.to(w.dtype) @ w.t(), x.t() @ grad.to(x.dtype)

    check(lambda x, w: Scale.apply(x, w) * 2, *matrices(), use=under_autocast)


def test_double_backward_under_autocast() -> None:
    def use(fn: Callable[..., Any], x: Tensor, w: Tensor) -> Any:
        with autocast():
            out = fn(x, w)
        return torch.autograd.grad(out.float().sum(), (x, w), create_graph=True)

    check(lambda x, w: (x @ w).sin(), *matrices(), use=use)
