"""Which step of the compiler makes a graph fail: bisection without a script."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stator.debug.bisect import Guilty, Limits, find_guilty
from stator.debug.minify.case import Case
from stator.debug.minify.checks import Elsewhere, needs_isolation
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How, shows
from stator.debug.minify.worker import started_worker


@dataclass(slots=True)
class Graph:
    """A graph that fails, compiled with some of the compiler."""

    case: Case
    how: How
    failure: Failure
    shows: Callable[[Case, How, Failure], bool]
    runs: int = 0

    def passes(self, limits: Limits) -> tuple[bool, list[list[str]]]:
        """Whether it does not fail in that way, and what was done."""
        self.runs += 1
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "rewrites.txt")
            how = self.how.with_options(**limits, fuel_log=str(log))
            well = not self.shows(self.case, how, self.failure)
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return well, [line.split("\t") for line in lines]

    def works_in_eager(self) -> bool:
        """It does: eager is what it is compared with."""
        return True


def blame(case: Case, how: How, failure: Failure) -> Guilty:
    """The rewrite, pass or operator that makes a graph fail; in a worker if it hangs or dies."""
    with ExitStack() as stack:
        if not needs_isolation(failure):
            return find_guilty(Graph(case, how, failure, shows))
        worker = stack.enter_context(started_worker())

        def shows_elsewhere(case: Case, how: How, failure: Failure) -> bool:
            return Elsewhere(how, worker).shows(case, failure)

        return find_guilty(Graph(case, how, failure, shows_elsewhere))
