"""Flat kernels: no inner axes, so the last outer axis is the loop that becomes vectors."""

from __future__ import annotations

from dataclasses import dataclass

from stator.codegen.llvm.emitter import Emitter
from stator.loops.index import (
    Axis,
    Index,
)
from stator.loops.ir import (
    Stage,
    Store,
)


@dataclass(slots=True)
class Flat(Emitter):
    """Writes the loops of a kernel without inner axes."""

    def emit(self) -> None:
        """No inner axes: rows of the last outer axis, clipped to the stretch at both ends."""
        *rows, last = self.kernel.outer or (Axis("only", Index.of(1)),)
        if not rows:
            self._loop(last, "%begin", "%end")
            return
        w = self.w
        # Of an empty row nothing is asked.
        length = self._clip(self.index(last.size), "1", larger=True)
        first = w.let(f"udiv i64 %begin, {length}")
        beyond = w.let("sub i64 %end, 1")
        final = w.let(f"udiv i64 {beyond}, {length}")
        stop = w.let(f"add i64 {final}, 1")
        some = w.let("icmp slt i64 %begin, %end")
        stop = w.let(f"select i1 {some}, i64 {stop}, i64 {first}")
        with self._row_loop(tuple(rows), first, stop) as loop:
            start = w.let(f"mul i64 {loop.counter}, {length}")
            low = self._clip(w.let(f"sub i64 %begin, {start}"), "0", larger=True)
            high = self._clip(w.let(f"sub i64 %end, {start}"), length, larger=False)
            body = self.kernel.statements

            def emit() -> None:
                self._vector_loops(last, (low, high), body, lambda: self._body(self.kernel.stages))

            self.versions(body, last, emit)

    def _loop(self, axis: Axis, low: str, high: str) -> None:
        vectors = self._vectors(axis, self.kernel.statements)
        with self.w.loop(low, high, [], "flat", vectors) as loop:
            self._enter(axis, loop.counter)
            self._body(self.kernel.stages)

    def _body(self, stages: tuple[Stage, ...]) -> None:
        if self.kernel.shares:  # all loads before the first store
            for statement in self.kernel.statements:
                self.value(statement.value)
        for stage in stages:
            for statement in stage.body:
                assert isinstance(statement, Store), "a flat kernel accumulates nothing"
                self._store(statement)
