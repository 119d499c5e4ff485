"""A program is measured three ways, and its bits are compared."""

from __future__ import annotations

import torch

from benchmarks.numerics import CASES, Case, chain, measure, report
from benchmarks.row import Budget


def test_a_program_is_measured() -> None:
    case = Case("small", lambda: (chain, torch.randn(2000).bfloat16()))
    row = measure(case, Budget(rounds=2, seconds=1))

    assert row.exact.low > 0
    assert row.same
    assert "| small |" in report([row])
    assert "eager's |" in report([row])


def test_there_is_one_of_each_kind() -> None:
    assert any(case.trained for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
