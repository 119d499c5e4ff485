"""Group norm, forward and backward, against eager and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm

from tests.ops.fused import check_fused
from tests.ops.layouts import plain


@pytest.mark.parametrize("size", [(2, 6, 5, 4), (3, 6, 7), (2, 6), (1, 6, 3, 4, 5), (2, 6, 40, 40)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_sizes(size: tuple[int, ...], groups: int) -> None:
    """Any number of dimensions; all channels together, some, each alone."""
    given = [plain(*size), plain(6), plain(6)]
    if size == (2, 6) and groups == 6:
        return  # eager refuses a group of one element
    check_fused(lambda x, w, b: group_norm(x, groups, w, b), *[v.requires_grad_() for v in given])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    """Halves are widened."""
    given = [plain(2, 6, 5, 5, dtype=dtype), plain(6, dtype=dtype), plain(6, dtype=dtype)]
    check_fused(lambda x, w, b: group_norm(x, 3, w, b), *[v.requires_grad_() for v in given])


def test_halves_with_wide_parameters() -> None:
    """Eager takes bf16 with parameters of f32."""
    given = [plain(2, 6, 5, 5, dtype=torch.bfloat16), plain(6), plain(6)]
    check_fused(lambda x, w, b: group_norm(x, 2, w, b), *[v.requires_grad_() for v in given])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_gradients_of_some(wanted: tuple[int, ...]) -> None:
    """Only the gradients that somebody asks for."""
    given = [plain(2, 6, 5), plain(6), plain(6)]
    for index in wanted:
        given[index].requires_grad_()
    check_fused(lambda x, w, b: group_norm(x, 3, w, b), *given)


def test_without_parameters() -> None:
    """No weight, no bias."""
    check_fused(lambda x: group_norm(x, 3), plain(2, 6, 5, 5).requires_grad_())


def test_channels_last() -> None:
    """Channels that lie closest."""
    x = plain(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    check_fused(lambda x: group_norm(x, 3), x.requires_grad_())


def test_behind_an_activation() -> None:
    """What is dear is computed once."""

    def block(x: Tensor, norm: nn.GroupNorm) -> Tensor:
        result: Tensor = torch.relu(norm(torch.tanh(x)))
        return result

    check_fused(block, plain(2, 8, 6, 6).requires_grad_(), nn.GroupNorm(4, 8))
