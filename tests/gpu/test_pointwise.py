"""Formulas element by element: every size, dtype and layout that changes how a kernel is tiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.on_device import DEVICE, FLOATS, check, compiled, integers, randn

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def activations(x: Tensor) -> list[Tensor]:
    return [
        F.relu(x),
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        F.silu(x),
        F.elu(x),
        F.softplus(x),
        F.hardswish(x),
        F.mish(x),
        F.leaky_relu(x, 0.1),
        x.sigmoid(),
        x.tanh(),
    ]


def functions(x: Tensor, y: Tensor) -> list[Tensor]:
    positive = x.abs() + 0.1
    return [
        x.exp(),
        positive.log(),
        x.sin(),
        x.cos(),
        x.tan(),
        x.atan(),
        x.erf(),
        x.expm1(),
        positive.log1p(),
        positive.rsqrt(),
        positive.pow(y),
        torch.atan2(x, y),
        x.sinh(),
        torch.hypot(x, y),
        positive.log2(),
        x.exp2(),
    ]


@each_float
def test_activations_and_their_gradients(dtype: torch.dtype) -> None:
    check(activations, randn(37, 65, dtype=dtype, grad=True))


@each_float
def test_functions(dtype: torch.dtype) -> None:
    check(functions, randn(1000, dtype=dtype), randn(1000, dtype=dtype))


@pytest.mark.parametrize("count", [1, 31, 128, 1025, (1 << 20) + 3])
def test_any_number_of_elements(count: int) -> None:
    check(lambda x, y: (x * y + 1).relu() - y, randn(count), randn(count))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8, torch.uint8], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -100
    x, y = integers(100, 777, low=low, dtype=dtype), integers(9, 777, low=1, dtype=dtype)

    def formulas(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, x * y, x // y, x % y, x & y, x | y, x ^ y, ~x, x / y, x.clamp(2, 50), -x]

    check(formulas, x, y)


def test_shifts_and_comparisons() -> None:
    def formulas(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x << y, x >> y, x == y, x < y, (x > 3) & (y > 2), torch.where(x > y, x, y)]

    check(formulas, integers(1000, 513, low=-1000), integers(8, 513))


def test_broadcasting() -> None:
    def formula(a: Tensor, b: Tensor, c: Tensor, scale: float) -> Tensor:
        return (a + b) * c - scale

    check(formula, randn(5, 1, 33, grad=True), randn(7, 33, grad=True), randn(1, grad=True), 2.5)


def test_half_wide_and_whole_numbers_meet() -> None:
    def formulas(half: Tensor, single: Tensor, whole: Tensor, flag: Tensor) -> list[Tensor]:
        return [
            half + single,
            half * whole,
            single.to(torch.bfloat16) + half,
            half.float() * flag,
            whole.to(torch.float16) / 3,
            (half > 0) & flag,
            single.double() * 2,
            single.to(torch.int32),
        ]

    half, single = randn(255, dtype=torch.bfloat16), randn(255) * 50
    check(formulas, half, single, integers(10, 255), integers(2, 255).bool())


@each_float
def test_nan_and_infinity_go_where_eager_sends_them(dtype: torch.dtype) -> None:
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e30, 1e-30]
    x = torch.tensor(special, dtype=dtype, device=DEVICE).repeat(9)
    y = x.view(9, 9).t().reshape(-1).contiguous()

    def formulas(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            torch.maximum(x, y),
            torch.minimum(x, y),
            torch.fmax(x, y),
            x.clamp(-1, 1),
            F.relu(x),
            x.isnan(),
            x.isinf(),
            torch.nan_to_num(x),
            x.sign(),
            x < y,
            torch.where(x > 0, x, y),
            x.sigmoid(),
            x.exp(),
            x.round(),
        ]

    check(formulas, x, y)


def test_scalars_on_the_device_and_on_the_host() -> None:
    """A tensor of no dimensions may lie on the CPU: eager takes it as a number."""

    def formula(x: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return x * near + far

    check(formula, randn(100), randn(1)[0], torch.tensor(2.5))


def test_numbers_that_change_from_call_to_call() -> None:
    scaled = compiled(lambda x, scale: x * scale, dynamic=True)
    x = randn(10)

    for scale in (2, 3.5, 7.25, -1):
        assert torch.equal(scaled(x, scale), x * scale)
