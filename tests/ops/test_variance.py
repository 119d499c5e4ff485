"""Variance and standard deviation, against eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stator.loops.ir import Accumulate
from tests.ops.fused import FLOATS, check_fused
from tests.ops.layouts import DIMS, LAYOUTS, odd_values, plain
from tests.schedule.programs import scheduled


def spread(x: Tensor, dims: Any, correction: float, keep: bool) -> list[Any]:
    """All four operators."""
    return [
        x.var(dims, correction=correction, keepdim=keep),
        x.std(dims, correction=correction, keepdim=keep),
        *torch.var_mean(x, dims, correction=correction, keepdim=keep),
        *torch.std_mean(x, dims, correction=correction, keepdim=keep),
    ]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one")])
def test_layouts(layout: str) -> None:
    """Every set of dimensions of every layout."""

    def reduce(x: Tensor) -> list[Any]:
        return [x.var(dims) for dims in DIMS] + [x.std(dims, keepdim=True) for dims in DIMS]

    check_fused(reduce, LAYOUTS[layout]())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("correction", [0, 1, 2.5])
def test_types_and_corrections(dtype: torch.dtype, correction: float) -> None:
    """Degrees of freedom, also broken ones."""

    def reduce(x: Tensor) -> list[Any]:
        return [*spread(x, 1, correction, True), *spread(x, None, correction, False)]

    check_fused(reduce, plain(9, 40, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_values(dtype: torch.dtype) -> None:
    """NaN and infinity make it NaN; equal elements give 0."""
    check_fused(lambda x: spread(x, 1, 1, False), odd_values(dtype))


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e6])
def test_far_from_zero(shift: float) -> None:
    """Distances from the mean are taken exactly, where squares of the elements would cancel."""

    def reduce(x: Tensor) -> list[Any]:
        return [*spread(x, -1, 1, False), *spread(x, 0, 0, False), *spread(x, None, 1, False)]

    check_fused(reduce, plain(30, 2000) + shift)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", [0.0, 6e4, torch.inf, -torch.inf, torch.nan])
def test_whatever_element_comes_first(first: float, dtype: torch.dtype) -> None:
    """The one that distances are taken from in one pass."""
    x = plain(5, 300, dtype=dtype) + 30
    x[1:3, 0] = first
    x[2, 7] = torch.inf

    check_fused(lambda x: [*spread(x, 1, 1, False), *spread(x, 0, 0, True)], x)


def test_narrow_types_are_measured_in_one_loop() -> None:
    """Two sums over the same points; f64 has no wider type to take one pass in."""
    for dtype, counts in ((torch.float32, [2]), (torch.bfloat16, [2]), (torch.float64, [1, 1])):
        kernel = scheduled(lambda x: torch.var_mean(x, -1), torch.empty(40, 300, dtype=dtype)).only
        loops = [stage for stage in kernel.stages if stage.inner]

        found = [sum(isinstance(s, Accumulate) for s in stage.body) for stage in loops]
        assert found == counts, dtype


def test_too_few_elements() -> None:
    """Eager warns where no degree of freedom is left, so it computes that itself."""
    with pytest.warns(UserWarning, match="degrees of freedom"):
        check_fused(lambda x: x.var(1), plain(5, 1), stays=("var",))


def test_gradients() -> None:
    """Through each of them."""
    check_fused(lambda x: spread(x, -1, 1, False), plain(6, 9).requires_grad_())
    check_fused(lambda x: spread(x, (0, 2), 0, True), plain(3, 4, 5).requires_grad_())


def test_of_what_was_computed() -> None:
    """What is dear is computed once, not for each pass."""
    check_fused(lambda x: x.exp().tanh().var(-1), plain(6, 90))


def test_symbolic_sizes() -> None:
    """Counts that only the call knows."""
    check_fused(
        lambda x: spread(x, 0, 1, False) + spread(x, None, 0, True), plain(7, 9), dynamic=True
    )
