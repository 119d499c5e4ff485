"""What makes a program fail: less and less of the compiler, until one step is left.

The program is a script that fails (any exit status but 0, or none in time) if its result is wrong.
It runs with limits that the environment tells: so many rewrites, so many passes, so many operators
as kernels.  Where the first n of a kind make it fail, and the first n - 1 do not, the n-th is it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from stator.errors import StatorError
from stator.options import eager_environment, environment_for

TIMEOUT: Final = 120.0  # seconds, after which a script is taken to hang
SLACK: Final = 10.0  # seconds more than three times what a good run took

Limits = Mapping[str, Any]
Tell = Callable[[str, int, int], None]

REWRITES: Final = ""  # what the log's lines of each kind have behind the compilation's number
PASSES: Final = ", passes"
OPERATORS: Final = ", operators"
OFF: Final[Limits] = {"pass_fuel": 0, "kernel_fuel": 0, "executor": "python"}


@dataclass(frozen=True, slots=True)
class Guilty:
    """The first step of the compiler with which the program fails; `str` says it."""

    stage: str  # "rewrite", "pass", "kernel", "executor", or "trace"
    number: int = 0
    rewrites: list[str] = field(default_factory=list)  # the n-th of each compilation with so many
    passes: list[str] = field(default_factory=list)  # those in which these were
    nodes: list[str] = field(default_factory=list)  # operators that became kernels
    kernels: list[str] = field(default_factory=list)  # those in which these are
    runs: int = 0

    def __str__(self) -> str:
        lines = [f"{_STAGES[self.stage]}{f' {self.number}' if self.number else ''}:"]
        lines += [f"  rewrite {one}" for one in self.rewrites]
        lines += [f"  in pass {one}" for one in self.passes]
        lines += [f"  operator {one}" for one in self.nodes]
        lines += [f"  in {one}" for one in self.kernels]
        return "\n".join(lines if len(lines) > 1 else [lines[0].rstrip(":")])


_STAGES: Final = {
    "rewrite": "stage passes, rewrite",
    "pass": "stage passes, pass",
    "kernel": "stage kernels (lowering, fusion, code), operator",
    "executor": "stage executor: the native host program; from Python it runs well",
    "trace": "stage trace, partition or wrappers: neither passes nor kernels nor the executor",
}


class Trial(Protocol):
    """A program that can be run with some of the compiler."""

    runs: int

    def passes(self, limits: Limits) -> tuple[bool, list[list[str]]]:
        """Whether it ends well, and the log: compilation and kind, number, what was done."""

    def works_in_eager(self) -> bool:
        """Whether it ends well without any of it."""


@dataclass(slots=True)
class Script:
    """A script with its arguments, run in a process of its own."""

    command: Sequence[str]
    timeout: float = TIMEOUT
    runs: int = 0

    def passes(self, limits: Limits) -> tuple[bool, list[list[str]]]:
        """Whether it ends well with so much of the compiler, and what that did."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "rewrites.txt")
            others = {name: value for name, value in limits.items() if name != "fuel"}
            well = self._run(environment_for(limits.get("fuel"), log, others))
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return well, [line.split("\t") for line in lines]

    def works_in_eager(self) -> bool:
        """Whether it ends well if nothing is compiled."""
        return self._run(eager_environment())

    def _run(self, environment: dict[str, str]) -> bool:
        self.runs += 1
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *self.command],
                env=environment,
                capture_output=True,
                check=False,
                timeout=self.timeout,
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode == 0:  # what takes much longer than this from now on hangs
            self.timeout = min(self.timeout, SLACK + 3 * (time.perf_counter() - start))
        return done.returncode == 0


def bisect(command: Sequence[str], tell: Tell | None = None, *, timeout: float = TIMEOUT) -> Guilty:
    """Find what makes a script fail; `tell` hears what is counted and the range that is left."""
    return find_guilty(Script(command, timeout), tell)


def find_guilty(trial: Trial, tell: Tell | None = None) -> Guilty:
    """Find the step of the compiler with which a program fails."""
    well, log = trial.passes({})
    if well:
        raise StatorError(
            "the script does not fail", hint="have it exit with an error if a result is wrong"
        )
    for name, kind, found in (
        ("fuel", REWRITES, _rewrite),
        ("pass_fuel", PASSES, _pass),
        ("kernel_fuel", OPERATORS, _operator),
    ):
        if trial.passes({name: 0})[0]:
            return found(trial, *_least(trial, (name, kind), {}, log, tell))
    if trial.passes({"executor": "python"})[0]:
        return Guilty("executor", runs=trial.runs)
    return _among_several(trial, log, tell)


def _among_several(trial: Trial, whole: list[list[str]], tell: Tell | None) -> Guilty:
    """The guilty step of a program that no part alone makes right: one by one they join in."""
    if not trial.passes(OFF)[0]:
        if not trial.works_in_eager():
            raise StatorError(
                "the script fails in eager mode too",
                hint="Stator has no part in it: with TORCH_COMPILE_DISABLE=1 it fails as well",
            )
        return Guilty("trace", runs=trial.runs)
    limits = {name: value for name, value in OFF.items() if name != "executor"}
    if not trial.passes(limits)[0]:
        return Guilty("executor", runs=trial.runs)
    del limits["kernel_fuel"]
    well, log = trial.passes(limits)
    if not well:
        return _operator(trial, *_least(trial, ("kernel_fuel", OPERATORS), limits, log, tell))
    return _pass(trial, *_least(trial, ("pass_fuel", PASSES), {}, whole, tell))


def _least(
    trial: Trial, what: tuple[str, str], limits: Limits, log: list[list[str]], tell: Tell | None
) -> tuple[int, list[list[str]]]:
    """The least limit with which the program fails, and the log of that run; `log`: of no limit."""
    name, kind = what
    good, bad = 0, max((int(number) for _, number, _ in _of(log, kind)), default=0)
    while bad - good > 1:
        if tell is not None:
            tell(name, good, bad)
        middle = (good + bad) // 2
        well, found = trial.passes({**limits, name: middle})
        good, bad, log = (middle, bad, log) if well else (good, middle, found)
    return bad, log


def _of(log: list[list[str]], kind: str) -> list[list[str]]:
    """The numbered lines of one kind."""
    return [line for line in log if _kind(line[0]) == kind and line[1].isdecimal()]


def _kind(label: str) -> str:
    return label[label.index(",") :] if "," in label else REWRITES


def _rewrite(trial: Trial, number: int, log: list[list[str]]) -> Guilty:
    """The rewrite with that number of each compilation, and the pass it was made in."""
    named, within, last = [], [], ""
    for label, found, what in log:
        if _kind(label) == PASSES:
            last = what
        elif _kind(label) == REWRITES and found == str(number):
            named.append(f"{label}: {what}")
            within.append(last)
    return Guilty("rewrite", number, named, list(dict.fromkeys(within)), runs=trial.runs)


def _pass(trial: Trial, number: int, log: list[list[str]]) -> Guilty:
    named = [f"{label}: {what}" for label, found, what in _of(log, PASSES) if int(found) == number]
    return Guilty("pass", number, passes=named, runs=trial.runs)


def _operator(trial: Trial, number: int, log: list[list[str]]) -> Guilty:
    """The operator with that number of each compilation, and the kernels that compute it."""
    named, kernels = [], []
    for label, found, what in _of(log, OPERATORS):
        if int(found) == number:
            named.append(f"{label.partition(',')[0]}: {what}")
            node = what.rpartition(": ")[2]
            kernels += [text for where, key, text in log if (where, key) == (label, node)]
    return Guilty("kernel", number, nodes=named, kernels=kernels, runs=trial.runs)
