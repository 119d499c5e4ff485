"""The cut is timed at a depth and a budget, ours and PyTorch's, and written down."""

from __future__ import annotations

import re

from benchmarks.depths import Clock, Depth
from benchmarks.models import text
from benchmarks.partition import of_pytorch, of_stator, report


def test_both_cuts_are_timed() -> None:
    built = text.gpt2(text.TINY, train=True)

    ours, theirs = of_stator(built, 1), of_pytorch(built, 1)

    assert min(ours.seconds, theirs.seconds) > 0
    assert ours.nodes > 50  # of the joint graph: one of a forward alone has fewer
    assert theirs.nodes > 50


def test_each_budget_has_its_table() -> None:
    depth = Depth(12, {"stator": [Clock(0.1, 1000)] * 2, "PyTorch": [Clock(1.0, 800)] * 2})

    lines = re.sub(r" \([^)]*\)", "", report({1.0: [depth], 0.5: [depth]})).splitlines()

    assert [line for line in lines if line.startswith("At")] == ["At budget 1:", "At budget 0.5:"]
    assert lines.count("| 12 | 1000 | 100 | 1000 | 0.10 | 100 |") == 2
