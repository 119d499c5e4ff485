"""What was measured on a GPU, as benchmarks/gpu.json holds it, and what follows from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from benchmarks.spread import Spread

GpuKind: TypeAlias = Literal["host", "kernel", "infer", "train"]

EAGER: Final = "eager"
INDUCTOR: Final = "inductor"
STATOR: Final = "stator"
COMPILERS: Final = (INDUCTOR, STATOR)
GRAPHS: Final = "_graphs"  # ends the name of a contender with mode="reduce-overhead"
# Of the host row: what Dynamo takes with nothing behind it, and graphs called without Dynamo.
DYNAMO: Final = "dynamo"
ALONE: Final = "_alone"

FILE: Final = Path(__file__).with_name("gpu.json")
TIE: Final = 0.02  # a difference this small is none
NUMBERS: Final = re.compile(r"\[[\d\s.,e+-]+\]")


@dataclass(slots=True)
class GpuOutcome:
    """How one contender fared; times are in seconds, round by round."""

    error: str | None = None  # why it was not timed
    device: list[float] = field(default_factory=list)  # of one call, on the device alone
    whole: list[float] = field(default_factory=list)  # of one call, host included
    compile: float | None = None  # the first call less a warm one, caches empty
    backend: float | None = None  # of that, what came after Dynamo
    off: float | None = None  # the error against float64
    allowed: float | None = None  # the most that may be: twice eager's, and an ulp
    peak: int | None = None  # bytes on the device beyond those held before

    @property
    def is_wrong(self) -> bool:
        """Whether its error is more than is allowed."""
        return self.off is not None and self.allowed is not None and not self.off <= self.allowed


@dataclass(slots=True)
class GpuRow:
    """One row: every contender, and what the row is measured against."""

    name: str
    kind: GpuKind
    size: str
    memory_bound: bool = False
    moved: int = 0  # bytes: each input read once, each output written once
    flops: int = 0  # of products
    copy: float = 0.0  # bytes a second of a large copy in the same process
    seconds: float = 0.0  # that the row took
    error: str | None = None  # why there is nothing below
    recompiled: bool = False  # a graph was compiled while calls were timed
    outcomes: dict[str, GpuOutcome] = field(default_factory=dict)

    def spread(self, name: str, of: str) -> Spread | None:
        """Median and quartiles of a contender's "device" or "whole"."""
        times = self._times(name, of)
        return Spread.of(times) if times else None

    def median(self, name: str, of: str) -> float | None:
        """Median seconds of a contender's "device" or "whole"."""
        spread = self.spread(name, of)
        return spread.median if spread else None

    def speed(self, name: str, over: str, of: str = "whole") -> Spread | None:
        """How many times as fast as another contender, round by round."""
        ours, theirs = self._times(name, of), self._times(over, of)
        return Spread.of_ratios(theirs, ours) if ours and theirs else None

    def of_copy(self, name: str, of: str = "device") -> float | None:
        """The rate at which the bytes that must move did, as a share of a copy's."""
        seconds = self.median(name, of)
        return self.moved / seconds / self.copy if seconds and self.copy and self.moved else None

    def ahead_of_stator(self, of: str = "whole") -> list[str]:
        """Who is faster than Stator by more than a tie; with CUDA graphs, against the same."""
        found = []
        for name in self.outcomes:
            ours = STATOR + GRAPHS if name.endswith(GRAPHS) else STATOR
            speed = self.speed(ours, name, of) if name not in (ours, DYNAMO) else None
            if speed and speed.median < 1 - TIE:
                found.append(name)
        return found

    def _times(self, name: str, of: str) -> list[float]:
        outcome = self.outcomes.get(name)
        times: list[float] = [] if outcome is None else getattr(outcome, of)
        return times


@dataclass(slots=True)
class GpuRun:
    """All rows of a run, and the machine."""

    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[GpuRow] = field(default_factory=list)

    def of_kinds(self, *kinds: GpuKind) -> list[GpuRow]:
        """The rows of some kinds."""
        return [row for row in self.rows if row.kind in kinds]


def store(run: GpuRun, file: Path) -> None:
    """Write a run down; a reader never sees half of one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_shortened(asdict(run)), indent=1)
    # Rounds of one contender on one line: a file that can be read.
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    beside = file.with_suffix(".part")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(file)


def _shortened(value: Any) -> Any:
    """Five digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return value


def load(file: Path) -> GpuRun:
    """Read a run back."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        GpuRow(**{**row, "outcomes": {n: GpuOutcome(**o) for n, o in row["outcomes"].items()}})
        for row in stored["rows"]
    ]
    return GpuRun(stored["machine"], rows)


def merged(runs: Iterable[GpuRun], order: Sequence[str]) -> GpuRun:
    """One run of several; the last that has a row with times gives it."""
    machine: dict[str, Any] = {}
    rows: dict[str, GpuRow] = {}
    for run in runs:
        machine |= run.machine
        for row in run.rows:
            if row.name not in rows or row.error is None:
                rows[row.name] = row
    placed = {name: place for place, name in enumerate(order)}
    return GpuRun(machine, sorted(rows.values(), key=lambda row: placed.get(row.name, len(order))))
