"""Memory and times of training steps: taken of a small model, and told in a table."""

from __future__ import annotations

import pytest

from benchmarks import training_memory
from benchmarks.models.table import MODELS as TABLE
from benchmarks.peaks import MEBIBYTE
from benchmarks.record import EAGER, INDUCTOR, STATOR
from benchmarks.row import Budget
from benchmarks.training_memory import (
    MODELS,
    Held,
    Row,
    Times,
    built,
    held_by,
    measure,
    report,
    timed,
)
from tests.benchmarks.test_report import cells

# In place of a measurement: a process that fails, and says how it was started.
TELLS = """
import os, sys
sys.exit(" ".join([os.environ["GLIBC_TUNABLES"].partition("=")[0], *sys.argv[1:3]]))
"""


def test_every_model_has_a_small_one() -> None:
    assert MODELS.keys() <= TABLE.keys()


def test_the_memory_of_a_small_step_is_taken() -> None:
    task = built("llama4", tiny=True)

    held = held_by(STATOR, task)

    assert held.error is None
    assert all(leaf.grad is None for leaf in task.leaves)


def test_small_steps_are_timed() -> None:
    times = timed(built("llama4", tiny=True), peer=False, budget=Budget(rounds=2, seconds=1))

    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {EAGER: 2, STATOR: 2}
    assert not times.errors


def test_a_row_compares_with_inductor() -> None:
    row = Row(
        "gpt2",
        Times({EAGER: [0.4, 0.4], STATOR: [0.1, 0.2], INDUCTOR: [0.2, 0.4]}, foreign=0.1),
        {
            EAGER: Held(300 * MEBIBYTE),
            STATOR: Held(150 * MEBIBYTE, predicted=149 * MEBIBYTE),
            INDUCTOR: Held(200 * MEBIBYTE),
        },
    )

    lines = [cells(line) for line in report([row]).splitlines() if line.startswith("|")]

    stator = ["gpt2", "stator", "150 (125–175)", "0.50 (0.50–0.50)", "150", "0.75", "149"]
    assert lines[3] == stator
    assert lines[4] == ["gpt2", "Inductor", "300 (250–350)", "–", "200", "–", "–"]


def test_each_process_has_its_allocator_and_what_went_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_memory, "ONE_PEAK", TELLS)
    monkeypatch.setattr(training_memory, "ALL_TIMES", TELLS)

    row = measure("vit", peer=False, tiny=True, options=[])

    assert row.times.errors[""].startswith("glibc.malloc.mmap_max vit ")
    assert row.held[STATOR].error == "glibc.malloc.mmap_threshold vit stator"
    assert "- vit, stator: glibc.malloc.mmap_threshold vit stator" in report([row])
