"""Axes are split where indices divide them, and compute what they did."""

from __future__ import annotations

from typing import Final

import pytest

from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.schedule.split_axes import split_axes
from tests.fuzz.cases import decisions_of
from tests.fuzz.choices import Recorded
from tests.fuzz.kernels import make_kernel
from tests.schedule.interpret import require_equal, require_equal_on_random

# A statement over i0 of 3 and i1 of 64, and the sizes of the axes then.
FLAT: Final = {
    "merged": ("out[64*i0 + i1] = x[(i1 % 16) + 40*(i1 // 16)]", [3, 4, 16]),
    "merged twice": (
        "out[64*i0 + i1] = x[(i1 % 16) + 40*((i1 // 16) % 2) + (i1 // 32)]",
        [3, 2, 2, 16],
    ),
    "of one only the number of the part": ("out[64*i0 + i1] = x[(i1 // 32)]", [3, 2, 32]),
    "by two numbers": ("out[64*i0 + i1] = add(x[(i1 // 32)], x[(i1 % 16)])", [3, 2, 2, 16]),
    "of a part only a part": ("out[64*i0 + i1] = x[((i1 // 4) % 8)]", [3, 2, 32]),
    "of a part that fits not": ("out[64*i0 + i1] = x[((i1 // 16) % 3)]", [3, 4, 16]),
    "by few": ("out[64*i0 + i1] = x[(i1 % 2) + 2*(i1 // 2)]", [3, 64]),
    "not evenly": ("out[64*i0 + i1] = x[(i1 % 24)]", [3, 64]),
    "not at all": ("out[64*i0 + i1] = x[i1]", [3, 64]),
    "a sum": ("out[64*i0 + i1] = x[((i0 + i1) % 16)]", [3, 64]),
    "where the result lies": ("out[64*i0 + 4*(i1 % 16) + (i1 // 16)] = x[i1]", [3, 4, 16]),
    "in a choice": (
        "out[64*i0 + i1] = within((i1 // 16) - 1, 2, x[(i1 % 16)], 0.0:f32)",
        [3, 4, 16],
    ),
}


def flat(statement: str) -> Kernel:
    return parse(f"""
kernel k
  buffer x: f32[200]
  buffer out: f32[192]
  outer i0: 3, i1: 64
  stage
    {statement}
""")


@pytest.mark.parametrize("name", FLAT)
def test_axes_are_split_where_indices_divide_them(name: str) -> None:
    statement, sizes = FLAT[name]

    kernel = split_axes(flat(statement))

    assert [axis.size.constant for axis in kernel.outer] == sizes
    require_equal(flat(statement), kernel)
    assert parse(to_text(kernel)) is not None


def test_no_index_divides_any_more() -> None:
    text = to_text(split_axes(flat(FLAT["merged"][0])))

    assert "out[64*i0 + 16*i1 + i1_] = x[40*i1 + i1_]" in text


def test_inner_loops_are_split_each_by_itself() -> None:
    kernel = parse("""
kernel k
  buffer x: f32[400]
  buffer out: f32[192]
  outer i0: 3
  stage r0: 64
    acc_0 sum= x[(r0 % 16) + 40*(r0 // 16) + i0]
  stage r1: 64
    out[64*i0 + r1] = sub(x[r1], acc_0)
""")

    split = split_axes(kernel)

    assert [[a.size.constant for a in stage.inner] for stage in split.stages] == [[4, 16], [64]]
    require_equal(kernel, split)


def test_what_runs_in_order_stays() -> None:
    kernel = parse("""
kernel k
  buffer x: f32[200]
  buffer out: f32[64]
  scan r0: 64
    acc_0 sum= x[(r0 % 16) + 40*(r0 // 16)]
    out[r0] = acc_0
""")

    assert split_axes(kernel) == kernel


@pytest.mark.parametrize("shard", range(4))
def test_random_kernels_mean_the_same(shard: int) -> None:
    for number in range(6000 + shard, 6100, 4):
        kernel = make_kernel(Recorded(decisions_of(number)))
        if not kernel.shares and not kernel.is_list:
            require_equal_on_random(kernel, split_axes(kernel), number)
