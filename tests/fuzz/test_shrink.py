"""The shrinker finds small failing things."""

from __future__ import annotations

from stator.loops.parse import parse
from stator.loops.text import to_text
from tests.fuzz.shrink import shrunk, trimmed


def test_what_does_not_matter_is_left_out() -> None:
    found = shrunk([5, 9, 0, 3, 7, 7, 2], lambda made: 9 in made)

    assert found == [9]


def test_numbers_become_as_small_as_they_can() -> None:
    found = shrunk([40, 80], lambda made: len(made) == 2 and made[0] > 3 and made[1] > 50)

    assert found == [4, 51]


def test_statements_that_do_not_matter_are_dropped() -> None:
    kernel = parse(
        "kernel k\n  buffer x: f32[8]\n  buffer a: f32[8]\n  buffer b: f32[8]\n  outer i0: 8\n"
        "  stage\n    a[i0] = x[i0]\n    b[i0] = exp(x[i0])\n  stage\n    a[i0] = neg(x[i0])\n"
    )

    smaller = trimmed(kernel, lambda kernel: "exp" in to_text(kernel))

    (statement,) = smaller.statements
    assert str(statement) == "b[i0] = exp(x[i0])"
