"""Operators of users' in packages: called by name, held to what their fake versions said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stator
from stator.errors import Unsupported
from tests.aot.custom_operators import accumulate, min_and_max, scaled_sin


@torch.library.custom_op("stator_test::first_rows", mutates_args=())
def first_rows(x: Tensor, count: int) -> Tensor:
    """Some rows of `x`, or its sum: its fake version says all rows."""
    return x[:count].clone() if count else x.sum()


@first_rows.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return torch.empty_like(x)


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """What the function returns."""
        return self.function(x)


def packaged(function: Callable[[Tensor], Tensor], x: Tensor, folder: Path) -> str:
    """A package of a function of one tensor."""
    wishes = {"output_path": folder / "m.pt2", "levels": (1,)}
    return stator.aot_compile(Called(function), (x,), options=wishes)


def test_they_are_called_by_name(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        low, high = min_and_max([scaled_sin(x * 2, 0.5), x], 1.5)
        return scaled_sin(x, 3.0).exp() * high + low

    x = torch.randn(3, 4)
    path = packaged(function, x, tmp_path)
    torch.testing.assert_close(stator.load(path)(x), function(x))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), function(x))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2, r"first_rows\.default returned a tensor of size 2 in dimension 0, .* said 3: correct"),
        (0, r"first_rows\.default returned a tensor of 0 dimensions, .* said 2: correct"),
    ],
)
def test_what_they_return_is_what_was_promised(count: int, message: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    loaded = stator.load(packaged(lambda x: first_rows(x, count) + 1, x, tmp_path))
    with pytest.raises(RuntimeError, match=message):
        loaded(x)


def test_one_that_writes_is_refused_by_its_name(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        total = x * 2
        accumulate(total, x)
        return total + 1

    with pytest.raises(Unsupported, match=r"accumulate\.default, .*: it writes to its arguments"):
        packaged(function, torch.randn(3), tmp_path)
