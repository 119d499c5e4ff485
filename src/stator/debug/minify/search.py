"""The search for a smaller case: candidates come from strategies, and one that fails is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from stator.debug.minify.case import Case
from stator.debug.minify.record import Recorded, record

Check = Callable[[Case], bool]  # whether a case fails in the way that is looked for


class OutOfTime(Exception):  # noqa: N818  no error: what was found so far is the result
    """The search has taken as long as it may."""


class Strategy(Protocol):
    """Candidates that are smaller than the search's case, by steps of a granularity."""

    def __call__(self, search: Search, granularity: int) -> Iterator[Case | None]: ...


@dataclass(slots=True)
class Search:
    """The smallest case so far.  Candidates of a strategy are judged one by one."""

    case: Case
    check: Check
    save: Callable[[Case], None] = lambda case: None  # each success is written down
    tell: Callable[[str, Case], None] = lambda what, case: None
    deadline: float | None = None
    tries: int = 0
    kept: int = 0
    _values: Recorded | None = field(default=None)
    _seen: set[str] = field(default_factory=set)

    @property
    def values(self) -> Recorded:
        """What the nodes of the case compute in eager mode."""
        if self._values is None:
            self._values = record(self.case)
        return self._values

    def record_in(self, values: Recorded) -> None:
        """Use values that were recorded, maybe on disk."""
        self._values = values

    def attempt(self, candidate: Case | None, *, anew: bool = False) -> bool:
        """Whether a candidate fails, twice; it is the case from then on.

        `anew`: its values are others than those that were recorded.
        """
        if candidate is None or not self.is_failing(candidate) or not self.check(candidate):
            return False
        self.case = candidate
        self.kept += 1
        if anew:
            self._values = None
        self.save(candidate)
        return True

    def is_failing(self, candidate: Case) -> bool:
        """Whether a candidate fails; one that is judged twice was not asked for again."""
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise OutOfTime
        self.tries += 1
        return self.check(candidate)

    def improve(self, what: str, strategy: Strategy, granularity: int) -> bool:
        """Whether one of a strategy's candidates is smaller and fails."""
        self.tell(what, self.case)
        for candidate in strategy(self, granularity):
            if candidate is None or candidate.cost >= self.case.cost or self._known(candidate):
                continue
            if self.attempt(candidate):
                return True
        return False

    def _known(self, candidate: Case) -> bool:
        """Whether a candidate was judged before: strategies meet."""
        text = str(candidate.graph)
        found = text in self._seen
        self._seen.add(text)
        return found
