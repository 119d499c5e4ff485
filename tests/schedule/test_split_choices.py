"""Loops split where choices change: no iteration chooses, and all store what they did."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stator.loops.access import nodes
from stator.loops.index import Symbol
from stator.loops.ir import Kernel, Within
from stator.loops.parse import parse
from stator.lower.sizes import Sizes
from stator.schedule.split_choices import ENOUGH_ROWS, MOST_PARTS, split_choices
from tests.schedule.interpret import require_equal
from tests.schedule.programs import require_same

HEADER: Final = """
kernel k
  buffer x: f32[900]
  buffer y: f32[900]
  buffer out: f32[900]
  buffer total: f32[40]
"""


def kernel(body: str) -> Kernel:
    return parse(HEADER + body)


def row(*values: str, length: int = 11) -> Kernel:
    """One loop over `length` points, a statement for each value."""
    lines = [f"    out[i + {100 * d}] = {value}\n" for d, value in enumerate(values)]
    return kernel(f"  stage i: {length}\n" + "".join(lines))


def choices(of: Kernel) -> int:
    """How many choices are left."""
    return len({n for s in of.statements for n in nodes(s) if isinstance(n, Within)})


def lengths(of: Kernel) -> list[int | None]:
    """Points of the last axis of each stage."""
    return [stage.inner[-1].size.constant if stage.inner else 1 for stage in of.stages]


# Brute force


def linear(step: int, start: int) -> str:
    """step*i + start, as the text has it."""
    sign = "+" if start >= 0 else "-"
    return f"{step}*i {sign} {abs(start)}" if start else f"{step}*i"


@pytest.mark.parametrize("step", [-3, -2, -1, 1, 2, 3])
def test_a_choice_by_any_line_is_made_for_good(step: int) -> None:
    for start, limit in itertools.product(range(-12, 34, 3), (1, 2, 5, 11, 30)):
        value = f"within({linear(step, start)}, {limit}, x[i], y[i])"
        before = row(value)

        after = split_choices(before, Sizes())

        assert choices(after) == 0 or after is before
        assert sum(length or 0 for length in lengths(after)) == 11
        require_equal(before, after)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_loops_are_split_as_well(length: int) -> None:
    for start, limit in itertools.product(range(-3, 4), (1, 2, 4)):
        before = row(f"within({linear(1, start)}, {limit}, x[i], y[i])", length=length)

        after = split_choices(before, Sizes())

        require_equal(before, after)


def test_loads_that_only_one_side_may_do_stay_on_it() -> None:
    """The shifted load would be out of bounds on the other side: the interpreter raises there."""
    before = kernel("  stage i: 10\n    out[i] = within(i - 4, 6, x[i - 4], y[i + 890])\n")

    after = split_choices(before, Sizes())

    assert lengths(after) == [4, 6]
    require_equal(before, after)


def test_several_choices_make_several_parts() -> None:
    before = row("within(i, 3, x[i], within(i - 3, 4, y[i], x[0]))", "within(i - 7, 4, x[i], y[1])")

    after = split_choices(before, Sizes())

    assert lengths(after) == [3, 4, 4]
    assert choices(after) == 0
    require_equal(before, after)


def test_a_part_of_one_point_has_no_loop() -> None:
    before = row("within(i - 5, 1, x[i], y[i])")

    after = split_choices(before, Sizes())

    assert [len(stage.inner) for stage in after.stages] == [1, 0, 1]
    require_equal(before, after)


# What is left whole


def test_too_many_parts_are_left_whole() -> None:
    edges = [f"within(i - {2 * d}, 1, x[i], y[i])" for d in range(MOST_PARTS)]
    before = row(*edges)

    assert split_choices(before, Sizes()) is before


WHOLE: Final = {
    "accumulates": "  stage i: 8\n acc sum= within(i, 4, x[i], 0.0:f32)\n stage\n total[0] = acc",
    "in order": "  scan i: 8\n    out[i] = within(i, 4, x[i], y[i])\n",
    "chosen by another axis": "  stage j: 4, i: 8\n    out[8*j + i] = within(j, 2, x[i], y[i])\n",
    "chosen by two axes": "  stage j: 4, i: 8\n    out[8*j + i] = within(8*j + i, 20, x[i], y[i])",
    "chosen by a quotient": "  stage i: 8\n    out[i] = within((i // 2), 2, x[i], y[i])\n",
    "no choice": "  stage i: 8\n    out[i] = x[i]\n",
    "no loop": "  stage\n    out[0] = x[0]\n",
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_left_whole(name: str) -> None:
    before = kernel(WHOLE[name])

    assert split_choices(before, Sizes()) is before


def test_a_loop_of_unknown_length_is_left_whole() -> None:
    before = parse("""
kernel k
  buffer x: f32[s0]
  buffer out: f32[s0]
  outer j: 3
  stage i: s0
    out[i + j*s0] = within(i, 4, x[i], 0.0:f32)
""")

    assert split_choices(before, Sizes(hints={Symbol("s0"): 9})) is before


def test_a_limit_of_unknown_size_is_left_whole() -> None:
    before = parse(
        """
kernel k
  buffer x: f32[8]
  buffer out: f32[24]
  outer j: 3
  stage i: 8
    out[8*j + i] = within(i, s0, x[i], 0.0:f32)
""".replace("  outer", "  size s0\n  outer")
    )

    assert split_choices(before, Sizes(hints={Symbol("s0"): 4})) is before


# Flat kernels: the last axis moves inside


def flat(rows: int) -> Kernel:
    return kernel(
        f"  outer j: {rows}, i: 10\n  stage\n    out[10*j + i] = within(i, 4, x[10*j + i], y[i])\n"
    )


def test_a_flat_kernel_with_enough_rows_is_split_along_its_last_axis() -> None:
    before = flat(ENOUGH_ROWS)

    after = split_choices(before, Sizes())

    assert [axis.name for axis in after.outer] == ["j"]
    assert lengths(after) == [4, 6]
    require_equal(before, after)


def test_with_few_rows_threads_rather_share_all_points() -> None:
    before = flat(ENOUGH_ROWS - 1)

    assert split_choices(before, Sizes()) is before


def test_a_flat_kernel_without_choices_stays_flat() -> None:
    before = kernel("  outer j: 30, i: 10\n  stage\n    out[10*j + i] = x[10*j + i]\n")

    assert split_choices(before, Sizes()) is before


def test_an_axis_alone_stays_flat() -> None:
    before = kernel("  outer i: 90\n  stage\n    out[i] = within(i, 40, x[i], y[i])\n")

    assert split_choices(before, Sizes()) is before


# Programs


PROGRAMS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "cat": lambda x: torch.cat([x, x.neg(), x.exp()], 1),
    "halves turned": lambda x: torch.cat([-x[:, 4:], x[:, :4]], 1),
    "padded": lambda x: functional.pad(x, (2, 3)),
    "padded rows": lambda x: functional.pad(x, (0, 0, 1, 2)),
    "rolled": lambda x: torch.roll(x, 3, 1),
    "flipped and joined": lambda x: torch.cat([x.flip(1), x], 1),
    "row into a matrix": lambda x: torch.cat([x[:1] * 0, x[:-1]], 0) * x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_mean_what_they_did(name: str) -> None:
    require_same(PROGRAMS[name], torch.randn(18, 8))
