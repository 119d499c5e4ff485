"""Passes are timed at a depth, ours and Inductor's, and written down."""

from __future__ import annotations

import re

from benchmarks.depths import Clock, Depth
from benchmarks.models import text
from benchmarks.passes import of_stator as measured
from benchmarks.passes import report


def test_our_passes_are_timed() -> None:
    clock = measured(text.gpt2(text.TINY, train=True))

    assert clock.seconds > 0
    assert clock.nodes > 10


def test_a_depth_is_written_down() -> None:
    depth = Depth(6, {"stator": [Clock(0.1, 500)] * 2, "Inductor": [Clock(1.0, 800)] * 2})

    row = re.sub(r" \([^)]*\)", "", report([depth]).splitlines()[-1])
    assert row == "| 6 | 500 | 100 | 1000 | 0.10 | 200 |"
