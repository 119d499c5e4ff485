"""What was measured in one row, as it is stored, and what follows from it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.case import Kind
from benchmarks.spread import Spread
from benchmarks.work import PRODUCT_FLOPS, copied_bytes

EAGER: Final = "eager"
STATOR: Final = "stator"
INDUCTOR: Final = "inductor"
FROZEN: Final = "frozen"  # Inductor with freezing
STATOR_FROZEN: Final = "stator_frozen"  # Stator with freezing
ONNX_RUNTIME: Final = "onnx_runtime"
OPENVINO: Final = "openvino"
OTHERS: Final = (ONNX_RUNTIME, OPENVINO)  # they take a whole model, and its weights
CONTENDERS: Final = (EAGER, STATOR, STATOR_FROZEN, INDUCTOR, FROZEN, *OTHERS)

# A difference this small is none.
TIE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one contender fared; every time is in seconds."""

    error: str | None = None  # why it was not timed
    first_use: float | None = None  # a trivial program, compiled and called: once in a process
    first_call: float | None = None  # Dynamo, backend and the call itself, backward included
    backend: float | None = None  # of that, what came after Dynamo
    graphs: int = 0  # how many the backend was given
    relative_error: float | None = None
    times: tuple[float, ...] = ()  # of one call, round by round
    repeats: int = 1  # calls that one time is the mean of
    faults: float = 0.0  # pages faulted in, a call


@dataclass(frozen=True, slots=True)
class Row:
    """One row: every contender, and how fast the machine copied and multiplied meanwhile."""

    name: str
    kind: Kind
    conditions: str
    day: str
    error: str | None = None  # why there is nothing below
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    moved: int = 0  # bytes that must move
    flops: int = 0
    copies: tuple[float, ...] = ()  # seconds of a copy of `copied_bytes(moved)`, round by round
    products: tuple[float, ...] = ()  # seconds of a product of PRODUCT_FLOPS; if there are flops
    foreign: float | None = None  # share of the cores that others used
    pages_kept: bool = False
    recompiled: bool = False  # a graph was compiled while calls were timed

    def timed(self, name: str) -> Outcome | None:
        """The outcome of a contender that was timed."""
        outcome = self.outcomes.get(name)
        return outcome if outcome and outcome.times else None

    def speed(self, name: str, over: str) -> Spread | None:
        """How many times as fast as another contender; None if one of them was not timed."""
        ours, theirs = self.timed(name), self.timed(over)
        return Spread.of_ratios(theirs.times, ours.times) if ours and theirs else None

    def milliseconds(self, name: str) -> float | None:
        """Median time of a call."""
        outcome = self.timed(name)
        return 1e3 * statistics.median(outcome.times) if outcome else None

    def copy_rate(self) -> float | None:
        """Bytes a second of a copy of this row's size class, read and written."""
        return copied_bytes(self.moved) / statistics.median(self.copies) if self.copies else None

    def limits(self) -> list[float]:
        """Seconds that the machine needs at least, round by round: to move, or to multiply."""
        moving = [self.moved * seconds / copied_bytes(self.moved) for seconds in self.copies]
        if not self.products:
            return moving
        multiplying = [self.flops * seconds / PRODUCT_FLOPS for seconds in self.products]
        return [max(pair) for pair in zip(moving, multiplying, strict=True)]

    def over_limit(self, name: str) -> float | None:
        """Time of a call over that limit."""
        outcome = self.timed(name)
        return Spread.of_ratios(outcome.times, self.limits()).median if outcome else None

    def ahead_of_stator(self) -> list[str]:
        """The contenders that are faster than Stator, by more than a tie; frozen against frozen."""
        frozen = STATOR_FROZEN if self.timed(STATOR_FROZEN) else STATOR
        others = [name for name in CONTENDERS if name not in (STATOR, STATOR_FROZEN)]
        ours = {name: frozen if name in (FROZEN, *OTHERS) else STATOR for name in others}
        speeds = {name: self.speed(own, name) for name, own in ours.items()}
        return [name for name, speed in speeds.items() if speed and speed.median < 1 - TIE]


def store(row: Row, file: Path) -> None:
    """Write a row down."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(row), indent=1), encoding="utf-8")


def load(file: Path) -> Row:
    """Read a row back."""
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    outcomes = {name: Outcome(**_tuples(value)) for name, value in stored["outcomes"].items()}
    return Row(**{**_tuples(stored), "outcomes": outcomes})


def _tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in stored.items()}
