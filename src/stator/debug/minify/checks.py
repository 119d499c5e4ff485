"""Ways to ask whether a candidate fails as the first graph did: here, in a worker, by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from torch import fx

from stator.debug.minify.case import Case
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How, class_of, shows
from stator.debug.minify.record import fresh
from stator.debug.minify.worker import Worker

A_START: Final = 1.5  # seconds that a graph may take before it hangs, beyond those of its nodes
A_NODE: Final = 0.006  # about twice what a node takes to compile
MARGIN: Final = 3.0  # times as long as anything that ended: a hang
LEAST: Final = 0.4  # of what is expected: not less, however quick others were

Fails = Callable[[fx.GraphModule, list[Any]], bool]


def needs_isolation(failure: Failure) -> bool:
    """Whether a graph that fails so would take this process with it."""
    return failure.kind == "hang" or failure.message.startswith("killed")


class Checker(Protocol):
    """Knows how a case fails, and whether another does in the same way."""

    def first(self, case: Case) -> Failure | None:
        """How a case fails; None if it does not."""

    def shows(self, case: Case, failure: Failure) -> bool:
        """Whether a case fails in that way."""


@dataclass(frozen=True, slots=True)
class Here:
    """In this process."""

    how: How

    def first(self, case: Case) -> Failure | None:
        """How a case fails."""
        return class_of(case, self.how)

    def shows(self, case: Case, failure: Failure) -> bool:
        """Whether a case fails in that way."""
        return shows(case, self.how, failure)


@dataclass(slots=True)
class Elsewhere:
    """In a worker's children, which may crash or hang."""

    how: How
    worker: Worker
    timeout: float | None = None  # seconds; None: by the number of nodes
    slowest: float | None = None  # of what ended, against what was expected

    def first(self, case: Case) -> Failure | None:
        """How a case fails."""
        found = self._judged(case, self.how)
        if not found:
            return None
        if self.how.dynamic and found[0] not in self._judged(case, self._static):
            return replace(found[0], dynamic=True)
        return found[0]

    def shows(self, case: Case, failure: Failure) -> bool:
        """Whether a case fails in that way."""
        plain = replace(failure, dynamic=False)
        if plain not in self._judged(case, self.how):
            return False
        return not failure.dynamic or plain not in self._judged(case, self._static)

    @property
    def _static(self) -> How:
        return replace(self.how, dynamic=False)

    def _judged(self, case: Case, how: How) -> list[Failure]:
        usual = A_START + A_NODE * len(case.calls)
        pace = 1.0 if self.slowest is None else max(LEAST, MARGIN * self.slowest)
        found = self.worker.judge(case, how, self.timeout or pace * usual)
        if not any(one.kind == "hang" for one in found):
            self.slowest = max(self.slowest or 0.0, self.worker.seconds / usual)
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """By a function of the user's."""

    fails: Fails

    def first(self, case: Case) -> Failure | None:
        """How a case fails: the function knows."""
        return Failure("asked", detail="the given function says so") if self._ask(case) else None

    def shows(self, case: Case, failure: Failure) -> bool:
        """Whether a case fails."""
        return self._ask(case)

    def _ask(self, case: Case) -> bool:
        module = fx.GraphModule(case.module, case.graph)
        try:
            return bool(self.fails(module, fresh(case.inputs)))
        except Exception:  # the function itself does not take such a graph
            return False
