"""Pooling against eager: windows that overlap, leave gaps, reach over the border."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.fused import FLOATS, check_fused, sample

# size, step, padding, dilation, ceil_mode
MAX_WINDOWS: dict[str, tuple[Any, ...]] = {
    "apart": (2, 2, 0, 1, False),
    "overlapping": (3, 2, 1, 1, False),
    "every element": (3, 1, 1, 1, False),
    "with gaps": (2, 3, 0, 1, False),
    "oblong": ((3, 2), (1, 2), (1, 0), 1, False),
    "spread": (2, 2, 1, 2, False),
    "spread far": (3, 1, 1, 3, False),
    "over the end": (3, 2, 1, 1, True),
    "one": (1, 1, 0, 1, False),
}


@pytest.mark.parametrize("name", MAX_WINDOWS)
def test_max_pool(name: str) -> None:
    """Values, positions, gradients."""
    size, step, padding, dilation, ceil = MAX_WINDOWS[name]

    def run(x: Tensor) -> Any:
        return F.max_pool2d(x, size, step, padding, dilation, ceil, return_indices=True)

    check_fused(run, sample(2, 3, 7, 8))


def test_max_pool_of_other_ranks() -> None:
    """One dimension, three, no batch."""
    check_fused(lambda x: F.max_pool1d(x, 3, 2, 1) * 2, sample(2, 3, 9))
    check_fused(lambda x: F.max_pool3d(x, 2, return_indices=True), sample(2, 1, 4, 5, 4))
    check_fused(lambda x: F.max_pool3d(x, 3, 2, 1), sample(2, 1, 4, 5, 4))
    check_fused(lambda x: F.max_pool2d(x, 2, return_indices=True), sample(3, 6, 5))


def test_max_pool_of_large_windows() -> None:
    """Too many elements to write them all out."""

    def run(x: Tensor) -> Any:
        return F.max_pool2d(x, 9, 1, 4, return_indices=True)

    check_fused(run, sample(2, 1, 10, 11))
    x = sample(1, 1, 10, 11, grad=False)
    x[0, 0, 3, 4] = x[0, 0, 4, 1] = float("nan")
    x[0, 0, 8:] = float("-inf")
    check_fused(run, x)


def test_max_pool_of_odd_values() -> None:
    """NaN wins, the last one; of equal elements the first; of nothing but -inf the first."""

    def run(x: Tensor) -> Any:
        return F.max_pool2d(x, 3, 2, 1, return_indices=True)

    x = torch.zeros(1, 4, 6, 6)
    x[0, 1] = float("-inf")
    x[0, 2, 1, 1] = x[0, 2, 2, 3] = x[0, 2, 2, 4] = float("nan")
    x[0, 3] = torch.randint(0, 2, (6, 6)).float() / 0
    check_fused(run, x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_types(dtype: torch.dtype) -> None:
    """Half precision is summed in single precision and rounded once."""

    def run(x: Tensor) -> Any:
        return (
            F.max_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1),
            F.adaptive_avg_pool2d(x, 3),
            F.adaptive_max_pool2d(x, 3),
        )

    check_fused(run, torch.randn(2, 3, 7, 8).to(dtype).requires_grad_())


def test_max_pool_of_integers() -> None:
    """Integers as well."""
    whole = sample(1, 2, 6, 6, dtype=torch.int64)
    check_fused(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), whole)
    check_fused(lambda x: F.max_pool2d(x, 3, 2, 1), whole.to(torch.uint8))


@pytest.mark.parametrize("name", MAX_WINDOWS)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_max_pool_of_dequantised_integers(kind: torch.dtype, last: bool, name: str) -> None:
    """The largest integer is dequantised; where a window lies outside, -inf stays what it is."""
    size, step, padding, dilation, ceil = MAX_WINDOWS[name]
    bounds = torch.iinfo(kind).min, torch.iinfo(kind).max

    def run(x: Tensor) -> Any:
        real = (x.float() - 7) * 0.3
        return F.max_pool2d(real, size, step, padding, dilation, ceil), real * 2

    x = torch.randint(bounds[0], bounds[1] + 1, (2, 5, 7, 8)).to(kind)
    x[0, 0] = bounds[0]
    check_fused(run, x.contiguous(memory_format=torch.channels_last) if last else x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("last", [False, True])
def test_relu_behind_a_pool_is_relu_before_it(
    dtype: torch.dtype, last: bool, tmp_path: Path
) -> None:
    """NaN and infinities included; and the image is read once."""
    x = torch.randn(2, 4, 9, 10).to(dtype)
    x[0, 0, 2, 3], x[0, 1, 4, 4], x[1, 2] = float("nan"), float("inf"), float("-inf")
    x = x.contiguous(memory_format=torch.channels_last) if last else x

    def run(x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(x), 3, 2, 1) + 1

    check_fused(run, x)
    compiled = torch.compile(run, backend="stator", options={"dump_dir": str(tmp_path)})
    compiled(x)
    (kernels,) = tmp_path.rglob("forward_kernels.txt")
    assert kernels.read_text().count("kernel ") == 1


def test_positions_are_those_of_what_is_pooled() -> None:
    def run(x: Tensor) -> Any:
        return F.max_pool2d(F.relu(x), 3, 2, 1, return_indices=True)

    check_fused(run, sample(2, 3, 7, 8))  # many windows of zeros, and gradients
    check_fused(run, -torch.rand(2, 3, 7, 8))


@pytest.mark.parametrize("size", [3, 9])
def test_a_pool_of_what_others_want_in_memory_reads_it_there(size: int) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        real = (x.float() - 7) * 0.3
        pooled = F.max_pool2d(real, size, 1, size // 2)
        return pooled + 1, real @ real

    check_fused(run, torch.randint(0, 256, (1, 2, 12, 12), dtype=torch.uint8), stays=("bmm",))


def rises(x: Tensor) -> Tensor:
    return F.max_pool2d((x.float() - 3).mul(0.5).round() + 1, 3, 2, 1)


def falls(x: Tensor) -> Tensor:
    return F.max_pool2d((x.float() - 3) * -0.5, 3, 2, 1)


def wraps(x: Tensor) -> Tensor:
    return F.max_pool2d((x + 200).float(), 3, 2, 1)


@pytest.mark.parametrize(("fn", "outside"), [(rises, "0:u8"), (falls, "-inf:f32"), (wraps, "0:u8")])
def test_the_largest_is_found_before_integers_are_floats(
    fn: Callable[[Tensor], Tensor], outside: str, tmp_path: Path
) -> None:
    x = torch.randint(0, 256, (1, 2, 6, 6), dtype=torch.uint8)
    compiled = torch.compile(fn, backend="stator", options={"dump_dir": str(tmp_path)})
    torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=0)
    (kernels,) = tmp_path.rglob("forward_kernels.txt")
    assert f"{outside})" in kernels.read_text()


def test_a_window_outside_of_the_image_has_no_integer() -> None:
    def run(x: Tensor) -> Tensor:
        return F.max_pool2d(x.float() * 2, 2, 1, 1, 2)

    check_fused(run, torch.full((1, 1, 1, 1), 5, dtype=torch.uint8))


# size, step, padding, ceil_mode, count_include_pad, divisor_override
MEAN_WINDOWS: dict[str, tuple[Any, ...]] = {
    "apart": (2, 2, 0, False, True, None),
    "overlapping": (3, 2, 1, False, True, None),
    "padding left out": (3, 2, 1, False, False, None),
    "over the end": (3, 2, 1, True, True, None),
    "over the end, padding left out": (3, 2, 1, True, False, None),
    "oblong": ((3, 2), (1, 2), (1, 0), False, True, None),
    "with gaps": (2, 3, 0, False, True, None),
    "by a number": (3, 2, 1, True, False, 7),
    "step left out": (2, None, 1, False, False, None),
}


@pytest.mark.parametrize("name", MEAN_WINDOWS)
def test_avg_pool(name: str) -> None:
    """Means and gradients."""
    arguments = MEAN_WINDOWS[name]
    check_fused(lambda x: F.avg_pool2d(x, *arguments), sample(2, 3, 7, 8))
    check_fused(lambda x: F.avg_pool2d(x, *arguments), sample(3, 7, 8))


def test_avg_pool_of_other_ranks() -> None:
    """One dimension, three, and windows too large to be written out."""
    check_fused(lambda x: F.avg_pool1d(x, 3, 2, 1) * 2, sample(2, 3, 9))
    check_fused(lambda x: F.avg_pool3d(x, 2), sample(2, 1, 4, 5, 4))
    check_fused(lambda x: F.avg_pool3d(x, 3, 2, 1, True, False), sample(2, 1, 4, 5, 4))
    check_fused(lambda x: F.avg_pool2d(x, 9, 9, 4), sample(2, 1, 20, 22))
    check_fused(lambda x: F.lp_pool2d(x, 2, 2), sample(1, 2, 6, 6))


def test_pool_of_computed() -> None:
    """What is pooled is computed on the way, once where windows overlap."""

    def run(x: Tensor) -> Any:
        y = (x * 2 + 1).exp()
        return F.max_pool2d(y, 2).relu(), F.avg_pool2d(y.sin(), 3, 1, 1) + 1

    check_fused(run, sample(2, 3, 6, 6))


def test_pool_of_odd_inputs() -> None:
    """Channels last, transposed, expanded."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> Any:
        return (
            F.max_pool2d(x, 2, return_indices=True),
            F.avg_pool2d(x, 3, 1, 1),
            F.adaptive_avg_pool2d(x, (3, 2)),
            F.max_pool2d(y, 3, 2, 1),
            F.avg_pool2d(z, 2),
        )

    last = sample(2, 3, 6, 6, grad=False).to(memory_format=torch.channels_last)
    turned = sample(2, 3, 6, 5, grad=False).transpose(2, 3)
    check_fused(run, last, turned, sample(2, 1, 4, 4, grad=False).expand(2, 3, 4, 4))


@pytest.mark.parametrize("size", [(3, 4), (1, 5), (7, 8), (9, 11), (None, 2), (5, 3)])
def test_adaptive(size: tuple[int, int]) -> None:
    """As many windows as were asked for: fewer than elements, as many, more."""

    def run(x: Tensor) -> Any:
        return F.adaptive_avg_pool2d(x, size), F.adaptive_max_pool2d(x, size, return_indices=True)

    check_fused(run, sample(2, 3, 7, 8))


def test_adaptive_of_other_ranks() -> None:
    """One dimension, three, no batch, and large windows."""
    check_fused(
        lambda x: (F.adaptive_avg_pool1d(x, 4) * 2, F.adaptive_max_pool1d(x, 4)), sample(2, 3, 9)
    )
    check_fused(
        lambda x: (F.adaptive_avg_pool3d(x, (2, 3, 2)), F.adaptive_max_pool3d(x, (2, 3, 2))),
        sample(2, 1, 4, 5, 4),
    )
    check_fused(
        lambda x: (F.adaptive_avg_pool2d(x, 2), F.adaptive_max_pool2d(x, 2, return_indices=True)),
        sample(2, 20, 23),
    )
    check_fused(lambda x: F.adaptive_avg_pool2d(x, 1) * 2, sample(2, 3, 20, 20))


def test_columns() -> None:
    """Windows as columns, and added up again."""
    for how in ((3,), (2, 1, 0, 2), ((3, 2), (1, 2), (1, 0), (2, 1)), (2, 3, 2, 1), (2, 2, 1, 3)):
        check_fused(lambda x, how=how: F.unfold(x, *how), sample(2, 3, 7, 8))
        check_fused(lambda x, how=how: F.fold(F.unfold(x, *how), (7, 8), *how), sample(2, 3, 7, 8))
    check_fused(lambda x: F.unfold(x, 2) * 2, sample(3, 4, 5))


def test_dynamic_sizes() -> None:
    """Sizes that are known when it runs."""
    x = sample(3, 4, 8, 8, grad=False)

    def run(x: Tensor) -> Any:
        return F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1)

    torch._dynamo.mark_dynamic(x, 0)
    check_fused(run, x)
