"""The guilty rewrite is found by running a script with fewer and fewer of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stator.cli import app
from stator.debug.bisect import bisect, find_guilty
from stator.errors import StatorError

SCRIPT = '''
import sys
import torch
import stator

aten = torch.ops.aten


@stator.rule(example=lambda: (torch.randn(3),))
def right(x: torch.Tensor) -> stator.Rewrite:
    """-(-x)  -->  x"""
    return stator.Rewrite(before=aten.neg.default(aten.neg.default(x)), after=x + 0)


@stator.rule(example=lambda: (torch.randn(3),))
def wrong(x: torch.Tensor) -> stator.Rewrite:
    """exp(sin(x))  -->  exp(cos(x))"""
    return stator.Rewrite(
        before=aten.exp.default(aten.sin.default(x)), after=aten.exp.default(aten.cos.default(x))
    )


for one in (right, wrong):
    stator.passes.register("joint", one)


def program(x):
    return (-(-x.abs())).sin().exp()


x = torch.randn(5)
ours = stator.compile(program, strict=True)(x)
sys.exit(0 if torch.allclose(ours, program(x)) else 1)
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def test_the_wrong_rewrite_is_found(script: str) -> None:
    result = CliRunner().invoke(app, ["bisect", script])

    assert result.exit_code == 0, result.output
    assert "wrong: exp" in result.output
    assert "right" not in result.output


def test_a_script_that_does_not_fail_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fine.py"
    file.write_text("pass")
    with pytest.raises(StatorError, match="does not fail"):
        bisect([str(file)])


def test_a_script_that_always_fails_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text("raise SystemExit(3)")
    with pytest.raises(StatorError, match="in eager mode too"):
        bisect([str(file)])


class Pretended:
    """A program that fails with some of a compiler that does three things of each kind."""

    def __init__(self, *guilty: str, eager: bool = True) -> None:
        self.guilty = guilty
        self.eager = eager
        self.runs = 0
        self.seen: list[Mapping[str, Any]] = []

    def passes(self, limits: Mapping[str, Any]) -> tuple[bool, list[list[str]]]:
        """Whether none of the guilty steps is taken, and the log."""
        self.runs += 1
        self.seen.append(dict(limits))
        log, taken = [], [] if "executor" in limits else ["executor"]
        for what, label, fuel in (
            ("pass", "compilation 1, passes", limits.get("pass_fuel")),
            ("rewrite", "compilation 1", 0 if limits.get("pass_fuel") == 0 else limits.get("fuel")),
            ("node", "compilation 1, operators", limits.get("kernel_fuel")),
        ):
            for number in range(1, 4 if fuel is None else min(3, fuel) + 1):
                log.append([label, str(number), f"aten.{what}: {what}_{number}"])
                taken.append(f"{what}_{number}")
        log.append(["compilation 1, operators", "node_2", "kernel_0"])
        return not any(step in taken for step in self.guilty), log

    def works_in_eager(self) -> bool:
        """Whether eager would do."""
        return self.eager


@pytest.mark.parametrize(
    ("guilty", "stage", "words"),
    [
        ("rewrite_2", "rewrite", "rewrite compilation 1: aten.rewrite: rewrite_2"),
        ("pass_3", "pass", "pass_3"),
        ("node_2", "kernel", "in kernel_0"),
        ("executor", "executor", "host program"),
    ],
)
def test_the_guilty_step_is_named_whatever_it_is(guilty: str, stage: str, words: str) -> None:
    found = find_guilty(Pretended(guilty))

    assert found.stage == stage
    assert words in str(found)


@pytest.mark.parametrize("guilty", ["rewrite_2", "pass_3", "node_2"])
def test_nothing_is_run_twice(guilty: str) -> None:
    trial = Pretended(guilty)

    find_guilty(trial)

    assert all(limits not in trial.seen[:n] for n, limits in enumerate(trial.seen))


def test_of_two_guilty_steps_one_is_named() -> None:
    found = find_guilty(Pretended("pass_1", "node_3"))

    assert (found.stage, found.number) == ("kernel", 3)


def test_what_no_step_explains_is_said_to_be_the_trace() -> None:
    always = Pretended("executor", eager=True)
    always.passes = lambda limits: (False, [])  # type: ignore[method-assign]  # fails with anything

    assert find_guilty(always).stage == "trace"
