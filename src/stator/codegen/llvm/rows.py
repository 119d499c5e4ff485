"""Rows: outer iterations one after the other, each with all of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.emitter import PRIM_OF, Emitter, neutral
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.types import register
from stator.core.dtypes import DType
from stator.loops.index import (
    Axis,
)
from stator.loops.ir import (
    Accumulate,
    Combine,
    Stage,
    Store,
)

CHUNK: Final = 1024  # elements summed before a partial sum is put away: it keeps sums exact enough


@dataclass(slots=True)
class Rows(Emitter):
    """Writes the loops of a kernel that has inner axes."""

    def emit(self) -> None:
        """One outer iteration after the other, each with all of its stages."""
        with self.w.loop("%begin", "%end", [], "row") as loop:
            self._decode(self.kernel.outer, loop.counter)
            for stage in self.kernel.stages:
                self._stage(stage)

    # --- stages of rows ---

    def _stage(self, stage: Stage) -> None:
        accumulations = [s for s in stage.body if isinstance(s, Accumulate)]
        start = [neutral(s.combine, s.value.dtype) for s in accumulations]
        final = self._inner(stage, stage.inner, start, accumulations)
        self.values.clear()  # what was computed inside of the loops is not in scope behind them
        for statement, value in zip(accumulations, final, strict=True):
            self.accumulators[statement.name] = value

    def _inner(
        self,
        stage: Stage,
        axes: tuple[Axis, ...],
        start: list[str],
        accumulations: list[Accumulate],
    ) -> list[str]:
        """Loops over `axes`, carrying accumulators; returns their values behind the loops."""
        if not axes:
            return self._point(stage, start)
        kinds = [register(s.value.dtype) for s in accumulations]
        carried = list(zip(kinds, start, strict=True))
        axis, *rest = axes
        length = self.index(axis.size)
        if not rest and accumulations and _is_long(axis) and not stage.in_order:
            return self._chunks(stage, axis, start, accumulations)
        lanes = 0 if rest or stage.in_order else self._lanes(axis, stage.body)
        with self.w.loop("0", length, carried, "inner", lanes) as loop:
            self._enter(axis, loop.counter)
            loop.carried = self._inner(stage, tuple(rest), loop.carried, accumulations)
        return loop.results

    def _chunks(
        self, stage: Stage, axis: Axis, start: list[str], accumulations: list[Accumulate]
    ) -> list[str]:
        """A long loop in chunks, each accumulated from the neutral value, then combined."""
        w = self.w
        kinds = [register(s.value.dtype) for s in accumulations]
        fresh = [neutral(s.combine, s.value.dtype) for s in accumulations]
        length = self.index(axis.size)
        padded = w.let(f"add i64 {length}, {CHUNK - 1}")
        chunks = w.let(f"udiv i64 {padded}, {CHUNK}")
        with w.loop("0", chunks, list(zip(kinds, start, strict=True)), "chunk") as loop:
            low = w.let(f"mul i64 {loop.counter}, {CHUNK}")
            high = self._clip(w.let(f"add i64 {low}, {CHUNK}"), length, larger=False)
            chunk = list(zip(kinds, fresh, strict=True))
            with w.loop(low, high, chunk, "inner", self._lanes(axis, stage.body)) as inner:
                self._enter(axis, inner.counter)
                inner.carried = self._point(stage, inner.carried)
            loop.carried = [
                emit_prim(w, PRIM_OF[s.combine], [total, part], s.value.dtype)
                for s, total, part in zip(accumulations, loop.carried, inner.results, strict=True)
            ]
        return loop.results

    def _point(self, stage: Stage, carried: list[str]) -> list[str]:
        """Statements at one point of the inner axes."""
        values = iter(carried)
        following = []
        for statement in stage.body:
            if isinstance(statement, Store):
                self._store(statement)
            else:
                value = self.value(statement.value)
                dtype = statement.value.dtype
                total = self._combine(statement.combine, next(values), value, dtype)
                following.append(total)
                if stage.in_order:
                    self.accumulators[statement.name] = total
        return following

    def _combine(self, combine: Combine, total: str, value: str, dtype: DType) -> str:
        if combine in (Combine.SUM, Combine.PROD) and dtype.is_float:
            operation = "fadd" if combine is Combine.SUM else "fmul"
            # Reassociation is what lets the loop become vectors.
            return self.w.let(f"{operation} reassoc {register(dtype)} {total}, {value}")
        return emit_prim(self.w, PRIM_OF[combine], [total, value], dtype)


def _is_long(axis: Axis) -> bool:
    size = axis.size.constant
    return size is None or size > CHUNK
