"""A compilation's record: stages in order, their times and counts."""

from __future__ import annotations

import pytest

import stator
from stator.core import events
from stator.core.events import (
    Compilation,
    StageEvent,
    collected_records,
    last_compilation,
    start_compilation,
)


class Clock:
    """Stands in for the module `time`: the time is what the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


@pytest.fixture
def no_compilation_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_latest", [])


def test_a_stage_is_recorded_with_its_time_and_counts(clock: Clock) -> None:
    record = Compilation()

    with record.stage("fold", nodes=7) as progress:
        clock.now += 0.25
        progress.nodes = 5
        progress.changed = 2

    assert record.stages == [StageEvent("fold", 0.25, 7, 5, 2)]


@pytest.mark.parametrize(("after", "changed"), [(4, 3), (7, 0), (9, 2)])
def test_a_stage_that_names_no_changes_counts_nodes(after: int, changed: int) -> None:
    record = Compilation()

    with record.stage("trace", nodes=7) as progress:
        progress.nodes = after

    assert record.stages[0].changed == changed


def test_a_pass_that_says_it_changed_nothing_is_believed() -> None:
    record = Compilation()

    with record.stage("reorder", nodes=7) as progress:
        progress.nodes = 5
        progress.changed = 0

    assert record.stages[0].changed == 0


def test_stages_stand_in_the_order_they_ran_and_their_times_add_up(clock: Clock) -> None:
    record = Compilation()

    for name, seconds in (("trace", 1.0), ("partition", 0.5), ("plan", 0.25)):
        with record.stage(name):
            clock.now += seconds
        clock.now += 10  # between stages: nobody's time

    assert [stage.name for stage in record.stages] == ["trace", "partition", "plan"]
    assert record.seconds == 1.75


def test_an_empty_record_took_no_time() -> None:
    assert Compilation().seconds == 0


def test_a_stage_that_fails_is_the_one_that_was_running() -> None:
    record = Compilation()
    with record.stage("trace"):
        pass

    with pytest.raises(ZeroDivisionError), record.stage("partition"):
        raise ZeroDivisionError

    assert record.running == "partition"
    assert [stage.name for stage in record.stages] == ["trace"]


@pytest.mark.usefixtures("no_compilation_yet")
def test_before_the_first_compilation_there_is_no_record() -> None:
    assert last_compilation() is None


@pytest.mark.usefixtures("no_compilation_yet")
def test_the_newest_record_is_the_last_compilation() -> None:
    start_compilation()
    newest = start_compilation()

    assert last_compilation() is newest


@pytest.mark.usefixtures("no_compilation_yet")
def test_what_a_record_learns_later_shows_in_the_last_compilation() -> None:
    record = start_compilation()
    with record.stage("backward/plan"):
        pass

    last = stator.last_compilation()

    assert last is not None
    assert [stage.name for stage in last.stages] == ["backward/plan"]


@pytest.mark.usefixtures("no_compilation_yet")
def test_only_the_newest_record_is_kept_alive() -> None:
    for _ in range(3):
        start_compilation()

    assert len(events._latest) == 1


def test_records_share_nothing() -> None:
    one, other = Compilation(), Compilation()
    one.graphs["forward"] = "graph()"
    one.notes.append("a decision")
    with one.stage("trace"):
        pass

    assert (other.graphs, other.notes, other.stages) == ({}, [], [])


def test_records_are_collected_while_somebody_wants_them() -> None:
    start_compilation()
    with collected_records() as outer:
        first = start_compilation()
        with collected_records() as inner:
            second = start_compilation()
    start_compilation()

    assert [record.number for record in outer] == [first.number, second.number]
    assert inner == [second]
