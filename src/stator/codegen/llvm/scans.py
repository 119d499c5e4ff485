"""Scans: running sums and products by vectors, others several rows at a time.

A running sum waits for each of its additions.  Sums and products need not: a chunk of terms is
written down, vectors of it are summed up in themselves, and only their last lanes wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stator.codegen.llvm.emitter import VECTOR_BYTES, neutral
from stator.codegen.llvm.rows import Rows
from stator.codegen.llvm.sums import total_type
from stator.codegen.llvm.types import convert, register
from stator.core.dtypes import DType
from stator.loops.access import nodes
from stator.loops.index import Axis
from stator.loops.ir import Accumulate, Accumulated, Combine, Stage, Store

ABREAST: Final = 4  # rows, where no vectors are made: others go on while one waits
CHUNK: Final = 128  # terms that are written down


def is_scan(stage: Stage) -> bool:
    """Whether the stage is a scan along rows."""
    accumulates = any(isinstance(s, Accumulate) for s in stage.body)
    return stage.in_order and accumulates and len(stage.inner) == 1


def _has_vectors(stage: Stage) -> bool:
    """Whether every total is a sum or product of what does not wait for another total."""
    if not is_scan(stage):
        return False
    for statement in stage.body:
        if isinstance(statement, Store):
            if statement.combine is not None:
                return False
        elif statement.combine not in (Combine.SUM, Combine.PROD) or _waits(statement):
            return False
    return True


def _waits(statement: Accumulate) -> bool:
    return any(isinstance(node, Accumulated) for node in nodes(statement))


@dataclass(frozen=True, slots=True)
class Running:
    """A total, and the chunk of its terms, which become running totals in their place."""

    statement: Accumulate
    dtype: DType
    chunk: str

    @property
    def lanes(self) -> int:
        """How many of them make a vector."""
        return VECTOR_BYTES // self.dtype.bytes

    @property
    def vector(self) -> str:
        """LLVM's type of one."""
        return f"<{self.lanes} x {register(self.dtype)}>"


@dataclass(slots=True)
class Scans(Rows):
    """Writes the loops of a scan."""

    running: dict[str, Running] = field(default_factory=dict)

    def emit(self) -> None:
        """By vectors where they can be made, else blocks of rows."""
        for stage in self.kernel.stages:
            if _has_vectors(stage):
                self._open_chunks(stage)
        if self.running or len(self.kernel.stages) != 1:
            Rows.emit(self)
        else:
            self._blocks()

    # --- by vectors ---

    def _open_chunks(self, stage: Stage) -> None:
        for statement in stage.body:
            if isinstance(statement, Accumulate):
                dtype = total_type(statement, stage)
                chunk = self.w.let(f"alloca [{CHUNK} x {register(dtype)}], align 64")
                self.running[statement.name] = Running(statement, dtype, chunk)

    def _stage(self, stage: Stage) -> None:
        """Chunks of a row; what fills none, term by term."""
        if not _has_vectors(stage):
            Rows._stage(self, stage)
            return
        w, (axis,) = self.w, stage.inner
        length = self.index(axis.size)
        chunks = w.let(f"udiv i64 {length}, {CHUNK}")
        own = [self.running[s.name] for s in stage.body if isinstance(s, Accumulate)]
        start = [(register(r.dtype), neutral(r.statement.combine, r.dtype)) for r in own]
        with w.loop("0", chunks, start, "chunk") as loop:
            first = w.let(f"mul i64 {loop.counter}, {CHUNK}")
            self._write_terms(stage, first)
            loop.carried = [
                self._sum_up(running, before)
                for running, before in zip(own, loop.carried, strict=True)
            ]
            self._write_results(stage, first)
        done = w.let(f"mul i64 {chunks}, {CHUNK}")
        carried = [(kind, last) for (kind, _), last in zip(start, loop.results, strict=True)]
        with w.loop(done, length, carried, "inner") as rest:
            self._enter(axis, rest.counter)
            rest.carried = self._point(stage, rest.carried)
        self.values.clear()
        for running, total in zip(own, rest.results, strict=True):
            value = self._rounded(stage, running.statement, total)
            self.accumulators[running.statement.name] = value

    def _write_terms(self, stage: Stage, first: str) -> None:
        w, (axis,) = self.w, stage.inner
        terms = [s for s in stage.body if isinstance(s, Accumulate)]
        with w.loop("0", str(CHUNK), [], "term", self._vectors(axis, terms)) as loop:
            self._enter(axis, w.let(f"add i64 {first}, {loop.counter}"))
            for value, running in ((term.value, self.running[term.name]) for term in terms):
                kind = register(running.dtype)
                term = convert(w, self.value(value), value.dtype, running.dtype)
                place = w.let(f"getelementptr {kind}, ptr {running.chunk}, i64 {loop.counter}")
                w.line(f"store {kind} {term}, ptr {place}")
        self.values.clear()

    def _sum_up(self, running: Running, before: str) -> str:
        """Totals in the place of terms; the last of them."""
        w, vector, kind = self.w, running.vector, register(running.dtype)
        with w.loop("0", str(CHUNK // running.lanes), [(kind, before)], "vector") as loop:
            at = w.let(f"mul i64 {loop.counter}, {running.lanes}")
            place = w.let(f"getelementptr {kind}, ptr {running.chunk}, i64 {at}")
            totals = w.let(f"load {vector}, ptr {place}, align 64")
            distance = 1
            while distance < running.lanes:
                totals = self._combined(running, totals, self._moved(running, totals, distance))
                distance *= 2
            totals = self._combined(running, totals, self._everywhere(running, loop.carried[0]))
            w.line(f"store {vector} {totals}, ptr {place}, align 64")
            loop.carried = [w.let(f"extractelement {vector} {totals}, i64 {running.lanes - 1}")]
        return loop.results[0]

    def _moved(self, running: Running, totals: str, distance: int) -> str:
        """Each total `distance` lanes further on; neutral values come in."""
        lanes = running.lanes
        fresh = self._everywhere(running, neutral(running.statement.combine, running.dtype))
        mask = [lanes + k if k < distance else k - distance for k in range(lanes)]
        shown = ", ".join(f"i32 {lane}" for lane in mask)
        vector = running.vector
        return self.w.let(
            f"shufflevector {vector} {totals}, {vector} {fresh}, <{lanes} x i32> <{shown}>"
        )

    def _everywhere(self, running: Running, value: str) -> str:
        vector, lanes = running.vector, running.lanes
        one = self.w.let(f"insertelement {vector} poison, {register(running.dtype)} {value}, i64 0")
        return self.w.let(
            f"shufflevector {vector} {one}, {vector} poison, <{lanes} x i32> zeroinitializer"
        )

    def _combined(self, running: Running, left: str, right: str) -> str:
        name = "add" if running.statement.combine is Combine.SUM else "mul"
        prefix = "f" if running.dtype.is_float else ""
        return self.w.let(f"{prefix}{name} {running.vector} {left}, {right}")

    def _write_results(self, stage: Stage, first: str) -> None:
        w, (axis,) = self.w, stage.inner
        stores = [s for s in stage.body if isinstance(s, Store)]
        if not stores:
            return
        with w.loop("0", str(CHUNK), [], "result", self._vectors(axis, stores)) as loop:
            self.lane = loop.counter
            self._enter(axis, w.let(f"add i64 {first}, {loop.counter}"))
            for statement in stores:
                self._store(statement)
            self.lane = None
        self.values.clear()

    def _accumulated(self, expr: Accumulated) -> str:
        if self.lane is None or expr.name not in self.running:
            return Rows._accumulated(self, expr)
        running = self.running[expr.name]
        total = self._lane_of(running.chunk, running.dtype)
        return convert(self.w, total, running.dtype, expr.dtype)

    # --- by blocks of rows ---

    def _blocks(self) -> None:
        """Blocks of rows; those that are left over one by one."""
        w = self.w
        count = w.let("sub i64 %end, %begin")
        blocks = w.let(f"sdiv i64 {count}, {ABREAST}")
        with w.loop("0", blocks, [], "block") as loop:
            first = w.let(f"mul i64 {loop.counter}, {ABREAST}")
            start = w.let(f"add i64 %begin, {first}")
            places: list[dict[Axis, str]] = []
            for row in range(ABREAST):
                self._decode(self.kernel.outer, w.let(f"add i64 {start}, {row}"))
                places.append(dict(self.axes))
            self._abreast(places)
        done = w.let(f"mul i64 {blocks}, {ABREAST}")
        rest = w.let(f"add i64 %begin, {done}")
        with w.loop(rest, "%end", [], "row") as loop:
            self._decode(self.kernel.outer, loop.counter)
            self._stage(self.kernel.stages[0])

    def _abreast(self, places: list[dict[Axis, str]]) -> None:
        (stage,) = self.kernel.stages
        (axis,) = stage.inner
        sums = [s for s in stage.body if isinstance(s, Accumulate)]
        kinds = [total_type(s, stage) for s in sums]
        start = [(register(k), neutral(s.combine, k)) for s, k in zip(sums, kinds, strict=True)]
        with self.w.loop("0", self.index(axis.size), start * len(places), "inner") as loop:
            carried, following = loop.carried, []
            for row, place in enumerate(places):
                self.axes = dict(place)
                self._enter(axis, loop.counter)
                own = carried[row * len(sums) : (row + 1) * len(sums)]
                following += self._point(stage, own)
            loop.carried = following
        self.values.clear()
