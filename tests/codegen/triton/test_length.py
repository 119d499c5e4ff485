"""Kernels are about as long as what they compute: nothing is written again for every use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.codegen.triton.kernel import source_of
from stator.loops.parse import parse
from tests.schedule.programs import gpu_kernels

CHOSEN = """
kernel chosen
  buffer x: f32[1920]
  buffer y: f32[1920]
  outer i0: 30
  stage i1: 64
    acc0 sum= x[64*i0 + i1]
  stage i2: 64
    let before = within(i2 - 1, 64, mul(x[64*i0 + i2 - 1], exp(acc0)), 0.0:f32)
    let behind = within(i2 + 1, 64, mul(x[64*i0 + i2 + 1], exp(acc0)), 0.0:f32)
    y[64*i0 + i2] = add(before, behind)
"""

NESTED = """
kernel nested
  buffer x: f32[1920]
  buffer y: f32[1920]
  outer i0: 1920
  stage
    let inner = within(i0 - 3, 1800, sqrt(x[i0 - 3]), 0.0:f32)
    let other = within(i0 - 3, 1800, exp(sqrt(x[i0 - 3])), 1.0:f32)
    y[i0] = add(inner, within(i0 - 9, 900, other, 2.0:f32))
"""


def test_what_reads_nothing_is_computed_once_for_all_conditions() -> None:
    assert source_of(parse(CHOSEN)).count("exp(") == 1


def test_what_was_read_under_fewer_conditions_is_not_read_again_under_more() -> None:
    source = source_of(parse(NESTED))

    assert source.count("tl.load(") == source.count("sqrt") == 1
    assert source.count(" > ") == 2  # a question for each condition


def test_one_value_a_row_is_settled_before_windows_choose() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        scale = (x.sum(-1, keepdim=True) * w).exp()
        return sum(F.pad(x[:, n:] * scale, (0, n)) for n in (1, 2, 3))

    (kernel,) = gpu_kernels(fn, torch.randn(300, 64), torch.randn(300, 1))

    assert source_of(kernel).count("exp(") == 1


@pytest.mark.parametrize("outputs", [False, True])
def test_operators_that_read_the_one_before_twice_add_a_few_lines_each(outputs: bool) -> None:
    def lines(count: int) -> int:
        def fn(x: Tensor) -> list[Tensor]:
            made = [x]
            for _ in range(count):
                made.append(torch.sin(made[-1]) * made[-1] + made[-1])
            return made[1:] if outputs else made[-1:]

        (kernel,) = gpu_kernels(fn, torch.randn(300, 64))
        return source_of(kernel).count("\n")

    few, more, many = lines(10), lines(20), lines(30)

    assert many - more == more - few <= 60
