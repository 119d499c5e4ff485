"""Tensors that begin where a thread's widest access may not."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.on_device import FLOATS, check, compiled, randn


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("start", [1, 3, 8])
def test_inputs_may_begin_anywhere(start: int, dtype: torch.dtype) -> None:
    whole = randn(4099, dtype=dtype)

    check(lambda x: (x * 2).softmax(-1), whole[start : start + 4000])


def test_one_program_serves_both() -> None:
    whole = randn(4099, dtype=torch.bfloat16)
    program = compiled(lambda x: x * 2 + 1)

    for start in (0, 1, 8, 5):
        x = whole[start : start + 4000]
        torch.testing.assert_close(program(x), x * 2 + 1)


def test_what_is_written_in_place_may_begin_anywhere() -> None:
    whole, expected = (randn(4099, dtype=torch.bfloat16) for _ in range(2))
    expected.copy_(whole)

    def program(x: torch.Tensor) -> None:
        x.mul_(3)

    compiled(program)(whole[1:4001])
    program(expected[1:4001])

    torch.testing.assert_close(whole, expected)


def test_views_inside_of_a_program_begin_anywhere() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.mm(x, x)[:, 1:]
        return y, y.contiguous().cumsum(1)

    check(program, randn(64, 64))
