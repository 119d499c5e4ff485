"""Quantisation in loops: integers as torch's reference has them, every one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stator.torch_api import decomposed_quantization
from tests.ops.fused import torch_calls

quantized = decomposed_quantization()

BOUNDS: Final = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-32768, 32767)}
EPS: Final = 2.0**-12
KINDS = pytest.mark.parametrize("kind", BOUNDS, ids=str)
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def edges() -> Tensor:
    """Numbers half-way between integers, beyond the bounds, infinite and NaN."""
    halves = torch.arange(-300, 300) * 0.5
    return torch.cat([halves, halves * 0.1, torch.tensor([math.inf, -math.inf, math.nan, -0.0])])


def whole(kind: torch.dtype, *size: int) -> Tensor:
    """Integers of a type."""
    return torch.randint(*BOUNDS[kind], size).to(kind)


def check_exact(fn: Callable[..., Any], *inputs: Tensor, stays: bool = False) -> None:
    """Compiled and eager results have the same bits; no operator stays with torch."""
    found = torch.compile(fn, backend="stator", fullgraph=True)(*inputs)
    assert bool(torch_calls()) is stays
    torch.testing.assert_close(found, fn(*inputs), rtol=0, atol=0, equal_nan=True)


@KINDS
@FLOATS
def test_quantize_per_tensor(kind: torch.dtype, dtype: torch.dtype) -> None:
    def quantize(x: Tensor) -> list[Tensor]:
        pairs = [(0.1, 0), (0.5, 7), (1 / 3, -3), (1e-30, 1)]
        return [
            quantized.quantize_per_tensor.default(x, *pair, *BOUNDS[kind], kind) for pair in pairs
        ]

    check_exact(quantize, edges().to(dtype))


@KINDS
@FLOATS
def test_dequantize_per_tensor(kind: torch.dtype, dtype: torch.dtype) -> None:
    def dequantize(x: Tensor) -> list[Tensor]:
        return [
            quantized.dequantize_per_tensor.default(x, *pair, *BOUNDS[kind], kind, out_dtype=dtype)
            for pair in [(0.1, 0), (0.3, 7)]
        ]

    rounds = kind is torch.int16 and dtype is not torch.float32
    check_exact(dequantize, torch.arange(*BOUNDS[kind]).to(kind), stays=rounds)


@KINDS
@pytest.mark.parametrize(
    ("there", "back", "is_gone"),
    [
        ((0.1, 3), (0.1, 3), True),
        ((1e-20, 127), (1e-20, 127), True),
        ((1 / 3, 0), (1 / 3, 0), True),
        ((0.1, 3), (0.1, 4), False),
        ((0.1, 3), (0.2, 3), False),
        ((1e-37, 3), (1e-37, 3), False),  # products may be denormal
        ((0.1, 200), (0.1, 200), None),  # in some types
    ],
)
def test_what_is_dequantised_and_quantised_again_by_the_same_numbers(
    kind: torch.dtype,
    there: tuple[float, int],
    back: tuple[float, int],
    is_gone: bool | None,
    tmp_path: Path,
) -> None:
    def both(x: Tensor) -> Tensor:
        real = quantized.dequantize_per_tensor.default(x, *there, *BOUNDS[kind], kind)
        again: Tensor = quantized.quantize_per_tensor.default(real, *back, *BOUNDS[kind], kind)
        return again

    x = torch.arange(BOUNDS[kind][0], BOUNDS[kind][1] + 1).to(kind)
    options = {"dump_dir": str(tmp_path)}
    found = torch.compile(both, backend="stator", fullgraph=True, options=options)(x)
    torch.testing.assert_close(found, both(x), rtol=0, atol=0)
    (kernels,) = tmp_path.rglob("forward_kernels.txt")
    if is_gone is None:
        is_gone = kind is not torch.int8
    assert ("round" not in kernels.read_text()) is is_gone


@KINDS
def test_narrower_bounds_still_bind(kind: torch.dtype) -> None:
    def both(x: Tensor) -> Tensor:
        real = quantized.dequantize_per_tensor.default(x, 0.1, 3, *BOUNDS[kind], kind)
        again: Tensor = quantized.quantize_per_tensor.default(real, 0.1, 3, 5, 100, kind)
        return again

    check_exact(both, torch.arange(BOUNDS[kind][0], BOUNDS[kind][1] + 1).to(kind))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parameters_in_tensors(kind: torch.dtype, dtype: torch.dtype) -> None:
    def both(x: Tensor, scale: Tensor, zero_point: Tensor, low: Tensor, high: Tensor) -> Any:
        there = quantized.quantize_per_tensor.tensor(x, scale, zero_point, *BOUNDS[kind], kind)
        again = quantized.quantize_per_tensor.tensor2(x, scale, zero_point, low, high, kind)
        back = quantized.dequantize_per_tensor.tensor(there, scale, zero_point, *BOUNDS[kind], kind)
        last = quantized.dequantize_per_tensor.tensor2(again, scale, zero_point, low, high, kind)
        return there, again, back, last

    numbers = torch.tensor([0.1], dtype=dtype), torch.tensor([3])
    check_exact(both, edges(), *numbers, *map(torch.tensor, BOUNDS[kind]))


@KINDS
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("points", [torch.int64, torch.int8], ids=str)
def test_channels(kind: torch.dtype, axis: int, dtype: torch.dtype, points: torch.dtype) -> None:
    def both(x: Tensor, q: Tensor, scales: Tensor, zero_points: Tensor) -> list[Tensor]:
        rest = (axis, *BOUNDS[kind], kind)
        return [
            quantized.quantize_per_channel.default(x, scales, zero_points, *rest),
            quantized.dequantize_per_channel.default(q, scales, zero_points, *rest),
            quantized.dequantize_per_channel.default(q, scales, None, *rest),
        ]

    x = torch.randn(4, 6, 5) * 3
    x[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    scales = (torch.rand(x.size(axis)) * 0.1 + 0.01).to(dtype)
    zero_points = torch.randint(-5, 5, (x.size(axis),)).to(points)
    check_exact(both, x, whole(kind, 4, 6, 5), scales, zero_points)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(5, 70),
        torch.randn(3000) + 9,
        -torch.rand(4, 4),
        torch.zeros(3),
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, math.inf]),
        torch.tensor([-math.inf, 1.0]),
    ],
    ids=["both", "above", "below", "zero", "nan", "inf", "-inf"],
)
def test_parameters_are_chosen(x: Tensor) -> None:
    def choose(x: Tensor) -> list[Any]:
        return [
            choose.tensor(x, *BOUNDS[kind], EPS, kind)
            for choose in (quantized.choose_qparams, quantized.choose_qparams_symmetric)
            for kind in BOUNDS
        ]

    check_exact(choose, x)


def test_parameters_of_half_precision_are_chosen_by_torch() -> None:
    check_exact(
        lambda x: quantized.choose_qparams.tensor(x, 0, 255, EPS, torch.uint8),
        torch.randn(3, 3).bfloat16(),
        stays=True,
    )


def test_one_kernel_with_what_stands_around() -> None:
    """Nothing but the result is written."""

    def around(x: Tensor) -> Tensor:
        there = quantized.quantize_per_tensor.default(x.relu(), 0.1, 3, 0, 255, torch.uint8)
        back: Tensor = quantized.dequantize_per_tensor.default(there, 0.1, 3, 0, 255, torch.uint8)
        return back + 1

    check_exact(around, torch.randn(40, 30))


def test_nothing_to_quantize() -> None:
    def there(x: Tensor) -> Tensor:
        found: Tensor = quantized.quantize_per_tensor.default(x, 0.1, 3, 0, 255, torch.uint8)
        return found

    found = torch.compile(there, backend="stator", fullgraph=True)(torch.randn(0, 4))
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (0, 4))


def test_bounds_beyond_the_type_raise_as_eager_does() -> None:
    def there(x: Tensor) -> Tensor:
        found: Tensor = quantized.quantize_per_tensor.default(x, 0.1, 3, 0, 256, torch.uint8)
        return found

    with pytest.raises(AssertionError, match="out of bound"):
        torch.compile(there, backend="stator", fullgraph=True)(torch.randn(4))
