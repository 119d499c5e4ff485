"""Chains are as many kernels as they say; what a call costs is told apart from Dynamo's part."""

from __future__ import annotations

import pytest
import torch

from benchmarks import host_cost
from benchmarks.host_cost import (
    DYNAMO,
    NOT_COMPILED,
    PYTHON,
    STATOR,
    Contender,
    Made,
    Measured,
    Program,
    launches_in,
    measure,
    report,
    start,
)
from benchmarks.row import Budget
from tests.benchmarks.test_report import cells


def measured() -> Measured:
    """Two rounds, the second slower by a microsecond for all that Dynamo runs."""
    one, many = Program(1), Program(101)
    times = {
        one: {NOT_COMPILED.title: [5.0, 5.0], DYNAMO.title: [10, 11.0], STATOR.title: [12, 13.0]},
        many: {
            NOT_COMPILED.title: [405, 405.0],
            DYNAMO.title: [10, 11.0],
            STATOR.title: [22, 23.0],
        },
    }
    made = {
        (name, program): Made(program.kernels, program.kernels) if name == STATOR.title else Made()
        for program, contenders in times.items()
        for name in contenders
    }
    return Measured((one, many), times, made, foreign=0.01)


@pytest.mark.parametrize("contender", [STATOR, PYTHON], ids=lambda contender: contender.name)
@pytest.mark.parametrize("length", [1, 7])
def test_kernels_of_a_chain_do_not_fuse(contender: Contender, length: int) -> None:
    with torch.no_grad():
        assert start(contender, Program(length)).made == Made(length, length)


def test_a_chain_that_fuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "maxima", lambda _: lambda x: (x + 1).exp())

    with torch.no_grad(), pytest.raises(ValueError, match="launches 1 kernels, not 4"):
        start(STATOR, Program(4))


def test_launches_of_a_plan_are_counted_step_by_step() -> None:
    plan = """plan(x)
  a = kernel_0(a, x)
  together: b = kernel_1(b, a); c = kernel_2(c, a)
  y = aten.mm.default(b, c)
  kernel_3(x, y)
  return (y,)"""

    assert launches_in(plan) == 3


def test_contenders_have_code_of_their_own() -> None:
    first, second = (Program(3).function(one.name) for one in (STATOR, PYTHON))
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])

    assert first.__code__ != second.__code__
    assert first(x).tolist() == second(x).tolist() == [12.0, 15.0]


def test_differences_are_taken_within_a_round() -> None:
    beyond = measured().beyond_dynamo(STATOR.title, Program(1))

    assert beyond is not None
    assert (beyond.low, beyond.high) == (2, 2)
    assert measured().a_kernel(STATOR.title).median == pytest.approx(0.1)
    assert measured().a_kernel(NOT_COMPILED.title).median == pytest.approx(4)


def test_a_line_has_calls_then_parts_then_a_kernel_then_counts() -> None:
    text = report(measured())
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]

    assert lines[-1] == [
        "stator",
        *("12.5 (12.2–12.8)", "22.5 (22.2–22.8)"),
        *("2.0 (2.0–2.0)", "12.0 (12.0–12.0)"),
        "0.10 (0.10–0.10)",
        *("1 / 101", "1 / 101"),
    ]
    assert lines[2][3:5] == ["–", "–"]
    assert "takes stator 2.0 (2.0–2.0) µs, and eager 5.0 (5.0–5.0) µs" in text
    assert "2 rounds; others used 1% of the cores" in text


def test_all_are_measured_in_turn() -> None:
    found = measure((1, 2), peer=False, budget=Budget(rounds=2, seconds=1))

    for program in found.programs:
        assert [len(times) for times in found.times[program].values()] == [2] * 5
        assert min(min(times) for times in found.times[program].values()) > 0
        assert found.made[STATOR.title, program].launches == program.kernels
