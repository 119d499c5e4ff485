"""Budgets: steps of small models are measured along them, and broken promises are told."""

from __future__ import annotations

import pytest

from benchmarks import budgets
from benchmarks.budgets import (
    BUDGETS,
    DEFAULT,
    EVERYTHING,
    MODELS,
    TINY,
    Curve,
    Point,
    built,
    curve_of,
    measure,
    report,
    timed,
    times_of,
    times_report,
)
from benchmarks.peaks import MEBIBYTE
from benchmarks.row import Budget
from benchmarks.training_memory import Times
from tests.benchmarks.test_report import cells

# In place of a measurement: a process that fails, and says how it was started.
TELLS = """
import os, sys
names = ("OMP_WAIT_POLICY", "GLIBC_TUNABLES")
sys.exit(" ".join([*(name for name in names if name in os.environ), sys.argv[1], sys.argv[3]]))
"""


def point(budget: float, measured: int, predicted: int, gradients: float = 0.0) -> Point:
    """A step that holds some MiB, all of them in the pool."""
    there, said = (
        {"arena": 0, "pool": size * MEBIBYTE, "torch": 0} for size in (measured, predicted)
    )
    return Point(budget, said, there, gradients, 1e-6)


def lines(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith("|")]


def test_budgets_fall_from_all_to_nothing() -> None:
    assert len(BUDGETS) > 20
    assert (BUDGETS[0], BUDGETS[-1]) == (1, 0)
    assert sorted(BUDGETS, reverse=True) == list(BUDGETS)
    assert MODELS.keys() == TINY.keys()


def test_a_small_model_is_measured_along_three_budgets() -> None:
    curve = measure("llama4", (1.0, 0.5, 0.0), tiny=True)

    assert [one.error for one in curve.points] == [None] * 3
    assert [one.budget for one in curve.taken] == [1.0, 0.5, 0.0]
    assert all(one.peak > 0 for one in curve.taken)
    assert all(one.from_first <= curve.tolerance for one in curve.taken)
    assert all(one.from_eager <= curve.tolerance for one in curve.taken)
    assert curve.taken[0].from_first == 0


def test_a_budget_that_fails_leaves_the_others() -> None:
    curve = measure("llama4", (2.0, 1.0), tiny=True)

    assert [one.budget for one in curve.taken] == [1.0]
    assert "memory_budget" in (curve.points[0].error or "")
    assert next(curve.broken()) == "1 budgets failed"
    assert "- llama4 at 2: " in report([curve])


def test_promises_that_hold_are_kept() -> None:
    curve = Curve("gpt2", 20 * MEBIBYTE, 1e-3, [point(1, 103, 100), point(0, 50, 51, 1e-7)])

    row = ["gpt2", "20.0", "50.0", "103.0", "+3.0% at 1", "0.0%", "1e-07", "1e-06", "kept"]
    assert lines(report([curve]))[2] == row
    assert lines(report([curve]))[-2:] == [["1", "103.0 / 100.0"], ["0", "50.0 / 51.0"]]


def test_broken_promises_are_told() -> None:
    points = [point(1, 110, 100), point(0.5, 80, 80), point(0.25, 79, 79), point(0, 100, 100, 0.5)]
    found = lines(report([Curve("vit", MEBIBYTE, 1e-3, points)]))

    assert found[2][4:6] == ["+10.0% at 1", "26.6%"]
    broken = "1 peaks not as foreseen, worst in pool; peak rises at 0; 1 gradients differ"
    assert found[2][-1] == f"**{broken}**"
    assert found[5] == ["1", "**110.0 / 100.0**"]


def test_small_steps_are_timed() -> None:
    times = timed(built("llama4", tiny=True), Budget(rounds=2, seconds=1))

    assert {name: len(one) for name, one in times.seconds.items()} == {DEFAULT: 2, EVERYTHING: 2}
    assert not times.errors


def test_slower_is_slower_in_most_rounds() -> None:
    even = Times({DEFAULT: [0.9, 1.1, 1.0], EVERYTHING: [1.0, 1.0, 1.0]}, foreign=0.0)
    slow = Times({DEFAULT: [1.1, 1.1, 1.2], EVERYTHING: [1.0, 1.0, 1.0]}, foreign=0.0)

    found = lines(times_report({"gpt2": even, "vit": slow}))

    assert found[2][3:] == ["1.000 (0.950–1.050)", "0%", "kept"]
    assert found[3][-1] == "**slower**"


def test_each_process_has_its_surroundings_and_what_went_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "ONE_MODEL", TELLS)
    monkeypatch.setattr(budgets, "ONE_TIMES", TELLS)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    curve, times = curve_of("vit", ["--tiny"]), times_of("vit", ["--tiny"])

    assert "- vit: OMP_WAIT_POLICY vit --tiny" in report([curve])
    assert "- vit: GLIBC_TUNABLES vit --tiny" in times_report({"vit": times})
    assert lines(report([curve]))[2][-1] == "**not measured**"
