"""Memory and times of a chain: what a process says is read, written down and told in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import memory_chain
from benchmarks.memory_chain import (
    ALLOCATORS,
    CASE,
    Fared,
    Found,
    from_text,
    in_a_process,
    measure,
    report,
    table,
    to_text,
)
from benchmarks.peaks import MEBIBYTE
from benchmarks.record import EAGER, INDUCTOR, STATOR
from benchmarks.row import Budget
from tests.benchmarks.test_report import cells

# In place of a table: a process that fails, and says how it was started.
TELLS = """
import os, sys
name, _, *options = sys.argv[1:]
sys.exit(f"{'GLIBC_TUNABLES' in os.environ} {name} {' '.join(options)}")
"""


def found() -> Found:
    """Two rounds, the second twice as slow for all."""
    return Found(
        "glibc's own allocator",
        "a machine",
        contenders={
            EAGER: Fared(times=(0.4, 0.8), faults=1000, peak=768 * MEBIBYTE),
            STATOR: Fared(
                times=(0.1, 0.2), peak=512 * MEBIBYTE, predicted=500 * MEBIBYTE, graphs=1
            ),
            INDUCTOR: Fared(times=(0.2, 0.4), faults=512, graphs=1),
        },
        moved=3 * 10**8,
        copies=(0.01, 0.02),
        foreign=0.02,
    )


def test_a_table_arrives_as_it_was_sent() -> None:
    assert from_text(to_text(found())) == found()


def test_a_line_has_times_speeds_and_memory() -> None:
    lines = [cells(line) for line in table(found()).splitlines() if line.startswith("|")]

    assert lines[2:] == [
        ["eager", "600.0 (500.0–700.0)", "–", "0.50 (0.50–0.50)", "0.5", "1000", "768", "–"],
        [
            "stator",
            "150.0 (125.0–175.0)",
            *("4.00 (4.00–4.00)", "2.00 (2.00–2.00)"),
            *("2.0", "0", "512", "500"),
        ],
        ["Inductor", "300.0 (250.0–350.0)", "2.00 (2.00–2.00)", "–", "1.0", "512", "–", "–"],
    ]
    assert "2 rounds; a copy into warm memory 17.9 GB/s; others used 2% of the cores" in table(
        found()
    )


def test_what_went_wrong_is_told() -> None:
    whole = found()
    contenders = {**whole.contenders, STATOR: Fared(error="CompileError: no rule")}
    broken = replace(whole, contenders=contenders, recompiled=True)

    text = report([broken, Found("an allocator that keeps its pages", error="SIGKILL")], side=8)

    assert "| stator | error | – |" in text
    assert "- stator: CompileError: no rule" in text
    assert "- disturbed: a graph was compiled while calls were timed" in text
    assert "With an allocator that keeps its pages: not measured: SIGKILL" in text
    assert "on 8×8 float32" in text


def test_a_small_chain_is_measured() -> None:
    small = measure("here", CASE.tiny, peer=False, budget=Budget(rounds=2, seconds=1))

    assert list(small.contenders) == [EAGER, STATOR]
    assert [one.error for one in small.contenders.values()] == [None, None]
    assert [len(one.times) for one in small.contenders.values()] == [2, 2]
    assert small.contenders[STATOR].graphs == 1
    assert small.moved == 4 * (2 * 64 * 64 + 2 * 64)


@pytest.mark.parametrize(("allocator", "keeps"), ALLOCATORS.items())
def test_a_process_has_the_allocator_of_its_table(
    monkeypatch: pytest.MonkeyPatch, allocator: str, keeps: bool
) -> None:
    monkeypatch.setattr(memory_chain, "ONE_TABLE", TELLS)

    assert in_a_process(allocator, ["--tiny"]).error == f"{keeps} {allocator} --tiny"
