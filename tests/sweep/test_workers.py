"""A worker that dies or a file that is half full costs nothing but the case at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.cases import FORWARD, Unit
from tests.sweep.judge import BOTH_FAIL, EXCEPTION, PASS, Outcome
from tests.sweep.report import summarise, write_report
from tests.sweep.results import Conditions, ConditionsDifferError, ResultsFile, UnitResult
from tests.sweep.workers import Setup, SweepError, judge_units

_CRASHES = "tests.sweep.broken_backends:crashes"
_CONDITIONS = Conditions(torch="2.13", backend="stator", peer="aot_eager", samples=2)
_EXP = Unit("exp", "float32", FORWARD)
_FAILURE = Outcome(3, EXCEPTION, {"outputs: strides": "(1, 2), in eager (2, 1)"})


def _setup(backend: str, peer: str, samples: int, logs: Path) -> Setup:
    return Setup(backend, peer, samples, workers=1, limit=60.0, memory=12 * 2**30, logs=logs)


def test_a_crash_is_blamed_on_its_case_and_the_rest_goes_on(tmp_path: Path) -> None:
    (result,) = judge_units([_EXP], _setup(_CRASHES, "aot_eager", 2, tmp_path))

    assert [outcome.verdict for outcome in result.outcomes] == [EXCEPTION, EXCEPTION]
    assert "SIGKILL" in result.outcomes[0].differences["raises"]


def test_a_crash_of_the_peer_too_is_no_exception(tmp_path: Path) -> None:
    setup = _setup("tests.sweep.broken_backends:refuses", _CRASHES, 1, tmp_path)
    (result,) = judge_units([_EXP], setup)

    assert [outcome.verdict for outcome in result.outcomes] == [BOTH_FAIL]


def test_a_fault_of_the_sweep_itself_ends_it(tmp_path: Path) -> None:
    no_such_operator = Unit("no such operator", "float32", FORWARD)

    with pytest.raises(SweepError, match="no such operator"):
        list(judge_units([no_such_operator], _setup("aot_eager", "aot_eager", 1, tmp_path)))


def test_finished_units_are_read_back(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    result = UnitResult(_EXP, 9, [Outcome(0, PASS, graphs=1, seconds=0.5), _FAILURE])
    file.begin(_CONDITIONS)
    file.add(result)

    assert list(file.read(_CONDITIONS)) == [result]
    with pytest.raises(ConditionsDifferError, match="holds"):
        list(file.read(Conditions("2.11", "stator", "aot_eager", 2)))


def test_an_unlisted_exception_makes_a_sweep_bad() -> None:
    good = UnitResult(_EXP, 1, [Outcome(0, PASS, graphs=1)])
    bad = UnitResult(_EXP, 1, [_FAILURE])

    assert summarise([good]).is_good
    assert not summarise([]).is_good
    assert not summarise([good, bad]).is_good
    assert "**not reviewed**" in write_report([good, bad], _CONDITIONS)
