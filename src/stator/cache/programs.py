"""Compiled programs in the store: kept when they are made, found by other processes.

An entry holds what is left of a program when it is compiled (`Facts`) and the image of its forward
graph; each backward graph is an entry of its own, kept when it is first needed.  What is not there
is compiled as if there were no cache: from the captured graph, which a hit keeps for that purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stator.aot.function import BackwardGraph, BackwardGraphs, StoredBackward
from stator.aot.metadata import Facts
from stator.cache.codec import NotData, from_bytes, to_bytes
from stator.cache.key import Key
from stator.cache.store import Store
from stator.core.events import Compilation
from stator.core.torch_types import Boxed
from stator.runtime.constants import Furnished, load_program
from stator.runtime.native.image import Image
from stator.runtime.recorded import Recorded, Recordings


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """What an entry says, and its forward graph in memory."""

    facts: Facts
    forward: Boxed


@dataclass(slots=True)
class Programs:
    """The programs of one captured graph: under one key, with its lines."""

    store: Store
    key: Key
    lines: Sequence[str]
    record: Compilation
    recordings: Recordings = field(init=False)

    def __post_init__(self) -> None:
        self.recordings = Recordings(self.record.notes)

    def find(self) -> StoredProgram | None:
        """The program, if it was kept."""
        match self._read(self.key):
            case (
                Facts() as facts,
                (Image() | Recorded() | Furnished()) as image,
                int(inputs),
                int(outputs),
            ):
                run = self._loaded(image, "forward")
                if run is not None:
                    self.record.cache = "hit"
                    self.record.inputs, self.record.outputs = inputs, outputs
                    return StoredProgram(facts, run)
        self.record.cache = f"miss: {self.store.why_missing(self.key)}"
        return None

    def find_backward(self, missing: tuple[bool, ...]) -> BackwardGraph | None:
        """The backward graph for one set of tangents, if it was kept."""
        found = self._read(self.part(missing))
        if not isinstance(found, StoredBackward):
            return None
        run = self._loaded(found.image, "backward")
        if run is None:
            return None
        return BackwardGraph(run, found.tangents, found.like, found.overwrites)

    def keep(self, key: Key, value: Any) -> None:
        """Store something; what is no data is not stored, and the record says why."""
        try:
            payload = to_bytes(value, self.lines)
        except NotData as reason:
            self.record.notes.append(f"not kept in the cache: {reason}")
            return
        self.store.save(key, payload)
        if self.store.problem is not None:
            self.record.notes.append(f"cache: {self.store.problem}")

    def keeper(self, may_keep: Callable[[], str | None]) -> Keeping:
        """What a compilation hands its results to; `may_keep` says why not, if so."""
        return Keeping(self, may_keep)

    def part(self, missing: tuple[bool, ...]) -> Key:
        """The key of a backward graph."""
        told = "".join("-" if absent else "x" for absent in missing)
        return Key.of({**dict(self.key.parts), "backward": told})

    def _read(self, key: Key) -> Any:
        data = self.store.load(key)
        if data is None:
            return None
        try:
            return from_bytes(data, self.lines)
        except Exception as error:  # the checksum was right: another version's idea of an entry
            self.record.notes.append(f"cache: an entry cannot be read: {error!r}")
            return None

    def _loaded(self, image: Image | Recorded | Furnished, label: str) -> Boxed | None:
        try:
            with self.record.stage("load"):
                run = load_program(image, label, self.recordings)
        except Exception as error:  # a library lacks a function, say: here it is compiled anew
            self.record.notes.append(f"cache: an entry cannot be loaded: {error!r}")
            return None
        self.record.held[label], self.record.peaks[label] = image.held, image.held.all
        return run


@dataclass(slots=True)
class Keeping:
    """Keeps the graphs of one compilation."""

    programs: Programs
    may_keep: Callable[[], str | None]
    refused: bool = field(default=False)

    def keep_forward(self, facts: Facts, image: Any) -> None:
        """The program and its forward graph."""
        self.refused = self._is_refused(image)
        if not self.refused:
            record = self.programs.record
            kept = (facts, image, record.inputs, record.outputs)
            self.programs.keep(self.programs.key, kept)

    def keep_backward(self, missing: tuple[bool, ...], graph: BackwardGraph, image: Any) -> None:
        """A backward graph."""
        if not self.refused and not self._is_refused(image):
            stored = StoredBackward(image, graph.tangents, graph.like, graph.overwrites)
            self.programs.keep(self.programs.part(missing), stored)

    def _is_refused(self, image: Any) -> bool:
        """Whether something speaks against keeping; the record says what."""
        record = self.programs.record
        reason = "it has no native program" if image is None else self.may_keep()
        if record.fallback is not None:  # what failed once may work the next time
            reason = "a part of it could not be compiled"
        if reason is not None:
            record.notes.append(f"not kept in the cache: {reason}")
        return reason is not None


@dataclass(frozen=True, slots=True)
class FoundBackward:
    """Backward graphs from the store; those that are not there are compiled."""

    programs: Programs
    compile: Callable[[], BackwardGraphs]

    def backward(self, missing: tuple[bool, ...]) -> BackwardGraph:
        """The graph for the tangents that are there."""
        found = self.programs.find_backward(missing)
        return found if found is not None else self.compile().backward(missing)
