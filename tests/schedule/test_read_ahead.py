"""The first element of a row is read before loops that may store over it, and nothing else is."""

from __future__ import annotations

from typing import Final

import pytest

from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.schedule.read_ahead import read_ahead
from tests.codegen.llvm.execute import Compiled
from tests.schedule.interpret import require_equal


def less(place: str, length: int | str = 40, other: str = "x") -> Kernel:
    """A row, from which one element and the sum of the distances from it are taken away."""
    is_known = isinstance(length, int)
    size = 8 * length if is_known else f"8*{length}"
    at = f"{length}*i + {{}}" if is_known else f"i*{length} + {{}}"
    return parse(f"""
kernel less
  buffer x: f32[{size}]
  buffer z: f32[{size}]
  buffer y: f32[{size}]
  outer i: 8
  stage r: {length}
    acc sum= sub(x[{at.format("r")}], x[{place}])
  stage r: {length}
    y[{at.format("r")}] = sub(sub({other}[{at.format("r")}], x[{place}]), acc)
""")


def test_the_first_element_of_a_row_is_read_before_its_loops() -> None:
    before = less("40*i")

    after = read_ahead(before)

    opening, *loops = after.stages
    assert to_text(after).count("x[40*i]") == 1
    assert not opening.inner
    assert len(loops) == 2
    require_equal(before, after)
    Compiled(after).require()


KEPT: Final = {
    "another element": less("40*i + 1"),
    "the first of the first row": less("0"),
    "of what the loop does not read besides": less("40*i", other="z"),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_elements_are_read_where_they_were(name: str) -> None:
    assert read_ahead(KEPT[name]) is KEPT[name]


def test_what_the_kernel_itself_makes_is_not_read_ahead() -> None:
    kernel = parse("""
kernel made
  buffer x: f32[320]
  buffer e: f32[320]
  buffer y: f32[320]
  outer i: 8
  stage r: 40
    e[40*i + r] = exp(x[40*i + r])
  stage r: 40
    y[40*i + r] = sub(e[40*i + r], e[40*i])
""")

    assert read_ahead(kernel) is kernel


def test_of_an_empty_row_nothing_is_read() -> None:
    before = less("i*s0", "s0")
    after = read_ahead(before)

    assert len(after.stages) == 3
    for length in (0, 1, 33):
        require_equal(before, after, {"s0": length})
        Compiled(after).require({"s0": length}, threads=(1, 2))
