"""What a sweep found, unit by unit, and the file it is kept in while the sweep goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.sweep.cases import Unit
from tests.sweep.judge import Outcome


@dataclass(frozen=True, slots=True)
class Conditions:
    """What results must have in common to stand in one report."""

    torch: str
    backend: str
    peer: str
    samples: int  # at most so many of a unit


@dataclass(frozen=True, slots=True)
class UnitResult:
    """The outcomes of a unit, or the reason why it has none."""

    unit: Unit
    available: int = 0  # samples that torch's database has for it
    outcomes: list[Outcome] = field(default_factory=list)
    why_none: str | None = None


class ConditionsDifferError(Exception):
    """A file of results was made under other conditions than those of this run."""


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """JSON lines: the conditions first, then one line a finished unit."""

    path: Path

    def begin(self, conditions: Conditions) -> None:
        """Start an empty file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(asdict(conditions)) + "\n")

    def add(self, result: UnitResult) -> None:
        """Keep a finished unit."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def read(self, conditions: Conditions) -> Iterator[UnitResult]:
        """The units finished so far; raises when they were run under other conditions."""
        first, *lines = self.path.read_text().splitlines()
        found = Conditions(**json.loads(first))
        if found != conditions:
            raise ConditionsDifferError(f"{self.path} holds {found}, this run is {conditions}")
        for line in lines:
            yield _from_json(json.loads(line))


def _from_json(entry: dict[str, Any]) -> UnitResult:
    unit = Unit(**entry.pop("unit"))
    outcomes = [Outcome(**outcome) for outcome in entry.pop("outcomes")]
    return UnitResult(unit, outcomes=outcomes, **entry)
