"""What happened during a compilation: stages, their times, their texts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from stator.core.logs import logger

log: Final = logger("stages")


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One stage or pass that ran."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: int  # how many rewrites the pass made; for a stage, nodes added or removed


# Bytes from which on a buffer is a tensor of its own, not in the arena.
LARGE: Final = 1 << 16  # our pool gives it in 0.2 µs
LARGE_ON_GPU: Final = 1 << 20  # torch's allocator takes longer


def is_large(size: int, on_gpu: bool) -> bool:
    """Whether a buffer of so many bytes is a tensor of its own."""
    return size >= (LARGE_ON_GPU if on_gpu else LARGE)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a graph holds at most, by where they come from."""

    arena: int  # for the whole of a call
    pool: int  # results of kernels, and of calls that write where they are told
    torch: int  # results of all other calls

    @property
    def all(self) -> int:
        """Bytes of all three: none gives to another what it does not need any more."""
        return self.arena + self.pool + self.torch


@dataclass(frozen=True, slots=True)
class Home:
    """The memory that a value lies in, maybe with others."""

    owner: str  # the name of what it was made for
    bytes: int  # 0: the caller holds it anyway
    by_torch: bool  # else the pool's


# A node of a graph: its name, its text, and the user's line that it came from.
NodeText: TypeAlias = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class PassNote:
    """What a pass did, for an explanation."""

    graph: str
    name: str
    seconds: float
    rewrites: tuple[str, ...]  # in the words of the passes themselves
    before: tuple[NodeText, ...]
    after: tuple[NodeText, ...]  # the same object if nothing changed


@dataclass(frozen=True, slots=True)
class SavedNote:
    """A value that the backward takes over from the forward."""

    name: str
    kind: str  # whose it is otherwise: an input, an output, or nobody's
    shape: str
    bytes: int
    line: str | None


@dataclass(slots=True)
class Details:
    """What is noted where an explanation is asked for, and nowhere else.

    Objects of the compiler are kept as they are: turning them into text costs nobody who only
    compiles.
    """

    passes: list[PassNote] = field(default_factory=list)
    texts: dict[str, tuple[NodeText, ...]] = field(default_factory=dict)  # graphs as they are now
    saved: list[SavedNote] = field(default_factory=list)
    lowered: dict[str, Any] = field(default_factory=dict)  # runtime.origins.Lowered, by graph
    plans: dict[str, Any] = field(default_factory=dict)  # runtime.origins.Programmed, by graph


@dataclass(slots=True)
class Compilation:
    """Record of one compilation.  A backward graph compiled later adds to the same record."""

    stages: list[StageEvent] = field(default_factory=list)
    graphs: dict[str, str] = field(default_factory=dict)  # text of each finished graph, by name
    notes: list[str] = field(default_factory=list)  # decisions, in words
    generated: int = 0  # operators that became kernels
    called: list[str] = field(default_factory=list)  # operators that are calls of torch's
    peaks: dict[str, int] = field(default_factory=dict)  # bytes that each graph holds at most
    held: dict[str, Held] = field(default_factory=dict)  # the same by where it comes from
    homes: dict[str, Home] = field(default_factory=dict)  # of what the forward keeps, by name
    inputs: int = 0  # bytes of arguments and parameters
    outputs: int = 0  # bytes that the caller gets
    choices: Any = None  # aot.partition.report.Choices: what the backward keeps, and what else
    details: Details | None = None  # more of all of this, where Options.explain asks for it
    cache: str | None = None  # "hit", or why it was none
    fallback: str | None = None  # why the graph runs in eager mode, if it does
    running: str = "start"  # the stage that began last
    number: int = 0  # of the compilation, in this process

    @property
    def predicted_peak(self) -> int | None:
        """Bytes beyond its inputs that the forward graph holds at most; None if unknown."""
        return self.peaks.get("forward")

    @property
    def step_peak(self) -> int | None:
        """Bytes that a training step holds at most, inputs included; None before the backward.

        Each of the three keeps what it once had for the rest of the step.
        """
        if "backward" not in self.held or "forward" not in self.held:
            return None
        before, after = self.held["forward"], self.held["backward"]
        return (
            self.inputs
            + max(before.arena, after.arena)
            + max(before.pool, after.pool + self.outputs)
            + max(before.torch, after.torch)
        )

    @property
    def seconds(self) -> float:
        """Time spent in all stages."""
        return sum(stage.seconds for stage in self.stages)

    @contextmanager
    def stage(self, name: str, nodes: int = 0) -> Iterator[_Progress]:
        """Time a stage; the body says how many nodes it left and what it changed."""
        self.running = name
        progress = _Progress(name, nodes)
        start = time.perf_counter()
        yield progress
        seconds = time.perf_counter() - start
        changed = progress.changed
        if changed is None:
            changed = abs(progress.nodes - nodes)
        self.stages.append(StageEvent(name, seconds, nodes, progress.nodes, changed))
        log.debug("compilation %d: %s, %.1f ms", self.number, name, 1e3 * seconds)


@dataclass(slots=True)
class _Progress:
    name: str
    nodes: int
    changed: int | None = None


_numbers = itertools.count(1)
_latest: list[Compilation] = []  # at most one: the newest
_collections: list[list[Compilation]] = []  # those that are being filled


def start_compilation() -> Compilation:
    """A new record, which `last_compilation` returns from now on."""
    record = Compilation(number=next(_numbers))
    _latest[:] = [record]
    for collection in _collections:
        collection.append(record)
    return record


@contextmanager
def collected_records() -> Iterator[list[Compilation]]:
    """A list that every record joins that is started meanwhile; each is filled as it goes on."""
    collection: list[Compilation] = []
    _collections.append(collection)
    try:
        yield collection
    finally:
        # Not `remove`: two collections that hold the same are equal.
        _collections[:] = [other for other in _collections if other is not collection]


def last_compilation() -> Compilation | None:
    """The record of the newest compilation in this process; None before the first."""
    return _latest[0] if _latest else None
