"""A kernel is measured for one size and for all."""

from __future__ import annotations

from benchmarks.kernels import KERNELS
from benchmarks.row import Budget
from benchmarks.symbolic import measure, report


def test_both_are_measured_and_written_down() -> None:
    case = next(case for case in KERNELS if case.name == "softmax")

    ratio, one, every = measure(case, Budget(rounds=2, seconds=1), tiny=True)

    assert min(ratio.low, one, every) > 0
    assert "| softmax | 1.00 | 2.00 | 2.00 |" in report([["softmax", "1.00", "2.00", "2.00"]])
