"""Loops split where choices change: no iteration chooses, and all store what they did."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stator.loops.access import header_sizes, indices, nodes, symbols
from stator.loops.index import Symbol
from stator.loops.ir import Kernel, Within
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.lower.sizes import Sizes
from stator.schedule.split_choices import ENOUGH_ROWS, MOST_PARTS, split_choices
from tests.fuzz.cases import decisions_of
from tests.fuzz.choices import Recorded
from tests.fuzz.kernels import make_kernel
from tests.schedule.interpret import require_equal, require_equal_on_random
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


def test_too_many_parts_of_a_like_are_left_whole() -> None:
    edges = [f"within(i - {3 * d}, 1, x[i], y[i])" for d in range(MOST_PARTS)]
    before = row(*edges)

    assert split_choices(before, Sizes()) is before


def test_of_too_many_parts_the_longest_is_cut_out() -> None:
    edges = [f"within(i - {d}, {20 - 2 * d}, x[i], y[i])" for d in range(MOST_PARTS)]
    before = row(*edges, length=20)

    after = split_choices(before, Sizes())

    assert lengths(after) == [3, 14, 3]
    assert not any(isinstance(n, Within) for s in after.stages[1].body for n in nodes(s))
    require_equal(before, after)


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


# Sizes that are not known


def unknown(*values: str, length: str = "n") -> Kernel:
    """One loop over `length` points, a statement for each value."""
    lines = [f"    out{d}[i] = {value}\n" for d, value in enumerate(values)]
    buffers = [f"  buffer out{d}: f32[{length}]\n" for d in range(len(values))]
    head = (
        "kernel k\n  size n\n  size m\n  number shift\n  buffer x: f32[40]\n  buffer y: f32[40]\n"
    )
    return parse(f"{head}{''.join(buffers)}  stage i: {length}\n{''.join(lines)}")


UNKNOWN: Final[dict[str, Kernel]] = {
    "joined": unknown("within(i, m, x[i], y[i])"),
    "joined of three": unknown("within(i, m + 2, within(i, m, x[i], y[i]), y[39 - i])"),
    "padded": unknown("within(i - 2, m, x[i - 2], 0.0:f32)"),
    "padded by a number": unknown("within(i - shift, m, x[i - shift], y[i])"),
    "padded on both sides": unknown("within(i - m, n - 2*m, x[i - m], y[i])"),
    "window": unknown(
        "add(within(2*i - 1, m, x[2*i - 1], y[i]), within(2*i + 1, m, x[2*i + 1], y[i]))",
        length="((m + 1) // 2)",
    ),
    "wide window": unknown(
        "within(i - 3, n, x[i - 3], y[i])",
        "within(i - 1, n, x[i - 1], y[i])",
        "within(i + 1, n, x[i + 1], y[i])",
        "within(i + 3, n, x[i + 3], y[i])",
    ),
    "backward": unknown("within(-2*i + m, n, x[-2*i + m], y[i])"),
    "backward by threes": unknown("within(-3*i + n - 1, m, x[-3*i + n - 1], y[i])"),
    "two that know nothing of each other": unknown(
        "within(i, m, x[i], y[i])", "within(i - shift, 5, x[i - shift], y[i])"
    ),
    "one in the other": unknown("within(i - 1, m, within(i, shift, x[i], y[i]), y[39 - i])"),
}
HINTS: Final = ((9, 4, 2), (3, 12, -1), (16, 16, 5))


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("hints", HINTS)
def test_at_every_size_loops_store_what_they_did(name: str, hints: tuple[int, ...]) -> None:
    symbols = (Symbol("n"), Symbol("m"), Symbol("shift", is_signed=True))
    before = UNKNOWN[name]

    after = split_choices(before, Sizes(hints=dict(zip(symbols, hints, strict=True))))

    for n, m, shift in itertools.product((0, 1, 2, 3, 7, 12), (0, 1, 2, 5, 13), (-3, 0, 1, 4, 20)):
        require_equal(before, after, {"n": n, "m": m, "shift": shift})


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_text_of_parts_is_read_back(name: str) -> None:
    hints = {Symbol("n"): 40, Symbol("m"): 30, Symbol("shift", is_signed=True): 2}

    after = split_choices(UNKNOWN[name], Sizes(hints=hints))

    assert parse(to_text(after)) is after


@pytest.mark.parametrize("shard", range(4))
def test_random_kernels_mean_the_same(shard: int) -> None:
    for number in range(7000 + shard, 7400, 4):
        kernel = make_kernel(Recorded(decisions_of(number)))
        if not kernel.shares and not kernel.is_list:
            # What a size was when a kernel was made says nothing of what it is.
            hints = {s: number % 9 for i in header_sizes(kernel) for s in symbols(i)}
            hints |= {
                s: number % 5 for st in kernel.statements for i in indices(st) for s in symbols(i)
            }
            require_equal_on_random(kernel, split_choices(kernel, Sizes(hints=hints)), number)


RESOLVED: Final = ("joined", "joined of three", "padded")


@pytest.mark.parametrize("name", RESOLVED)
def test_edges_in_a_known_order_leave_no_choice(name: str) -> None:
    hints = {Symbol("n"): 9, Symbol("m"): 4}

    assert choices(split_choices(UNKNOWN[name], Sizes(hints=hints))) == 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_longest_part_never_chooses(name: str) -> None:
    hints = {Symbol("n"): 40, Symbol("m"): 30, Symbol("shift", is_signed=True): 2}

    after = split_choices(UNKNOWN[name], Sizes(hints=hints))

    chosen = [any(isinstance(n, Within) for s in p.body for n in nodes(s)) for p in after.stages]
    assert not all(chosen)


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
