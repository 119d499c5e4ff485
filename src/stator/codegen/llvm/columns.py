"""Column reductions: accumulators are rows of memory, the loop over columns is innermost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stator.codegen.llvm.emitter import PRIM_OF, VECTOR_BYTES, Emitter, neutral
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.shape import COLUMNS
from stator.codegen.llvm.types import MEMORY, to_memory
from stator.loops.index import (
    Axis,
)
from stator.loops.ir import (
    Accumulate,
    Stage,
    Store,
)

STRETCH: Final = 128  # rows that one partial sum of a column takes in


@dataclass(slots=True)
class Columns(Emitter):
    """Writes the loops of a kernel that reduces across its last outer axis."""

    partials: dict[str, str] = field(default_factory=dict)  # rows of memory, of one stretch

    def emit(self) -> None:
        """Blocks of the last outer axis; accumulators are rows of memory."""
        *rows, last = self.kernel.outer
        w = self.w
        length = self.index(last.size)
        names = [s for s in self.kernel.statements if isinstance(s, Accumulate)]
        for statement in names:
            kind = MEMORY[statement.value.dtype.computed_in]
            for rows_of in (self.accumulators, self.partials):
                rows_of[statement.name] = w.let(f"alloca [{COLUMNS} x {kind}], align 64")
        padded = w.let(f"add i64 {length}, {COLUMNS - 1}")
        blocks = w.let(f"udiv i64 {padded}, {COLUMNS}")
        with w.loop("%begin", "%end", [], "block") as loop:
            row_number = w.let(f"udiv i64 {loop.counter}, {blocks}")
            block = w.let(f"urem i64 {loop.counter}, {blocks}")
            self._decode(tuple(rows), row_number)
            start = w.let(f"mul i64 {block}, {COLUMNS}")
            rest = w.let(f"sub i64 {length}, {start}")
            width = self._clip(rest, str(COLUMNS), larger=False)
            for stage in self.kernel.stages:
                self._column_stage(stage, last, start, width)

    def _column_stage(self, stage: Stage, last: Axis, start: str, width: str) -> None:
        """Rows into accumulators: by stretches of rows, so that no partial sum grows long."""
        accumulations = [s for s in stage.body if isinstance(s, Accumulate)]
        for statement in accumulations:
            self._clear(self.accumulators[statement.name], statement, width)

        def innermost() -> None:
            with self.w.loop("0", width, [], "column", self._lanes(last, stage.body)) as loop:
                self.lane = loop.counter
                self._enter(last, self.w.let(f"add i64 {start}, {loop.counter}"))
                for statement in stage.body:
                    if isinstance(statement, Store):
                        self._store(statement)
                    else:
                        row = self.partials.get(statement.name, self.accumulators[statement.name])
                        self._into(row, statement, self.value(statement.value))
                self.lane = None

        if accumulations and stage.inner:
            self._stretches(stage.inner, accumulations, width, innermost)
        else:
            self._nest(stage.inner, innermost)
        self.values.clear()

    def _stretches(
        self,
        axes: tuple[Axis, ...],
        accumulations: list[Accumulate],
        width: str,
        innermost: Callable[[], None],
    ) -> None:
        w = self.w
        length = self.index(axes[0].size)
        padded = w.let(f"add i64 {length}, {STRETCH - 1}")
        count = w.let(f"udiv i64 {padded}, {STRETCH}")
        with w.loop("0", count, [], "stretch") as loop:
            for statement in accumulations:
                self._clear(self.partials[statement.name], statement, width)
            low = w.let(f"mul i64 {loop.counter}, {STRETCH}")
            high = self._clip(w.let(f"add i64 {low}, {STRETCH}"), length, larger=False)
            with w.loop(low, high, [], "inner") as inner:
                self._enter(axes[0], inner.counter)
                self._nest(axes[1:], innermost)
            self.values.clear()
            for statement in accumulations:
                dtype = statement.value.dtype
                lanes = VECTOR_BYTES // dtype.computed_in.bytes
                with w.loop("0", width, [], "column", lanes) as column:
                    self.lane = column.counter
                    part = self._lane_of(self.partials[statement.name], dtype)
                    self._into(self.accumulators[statement.name], statement, part)
                    self.lane = None

    def _clear(self, row: str, statement: Accumulate, width: str) -> None:
        dtype = statement.value.dtype
        kind = MEMORY[dtype.computed_in]
        with self.w.loop("0", width, [], "clear", VECTOR_BYTES // dtype.computed_in.bytes) as loop:
            place = self.w.let(f"getelementptr {kind}, ptr {row}, i64 {loop.counter}")
            value = to_memory(self.w, neutral(statement.combine, dtype), dtype.computed_in)
            self.w.line(f"store {kind} {value}, ptr {place}")

    def _into(self, row: str, statement: Accumulate, value: str) -> None:
        dtype = statement.value.dtype.computed_in
        before = self._lane_of(row, dtype)
        after = emit_prim(self.w, PRIM_OF[statement.combine], [before, value], dtype)
        kind = MEMORY[dtype]
        place = self.w.let(f"getelementptr {kind}, ptr {row}, i64 {self.lane}")
        self.w.line(f"store {kind} {to_memory(self.w, after, dtype)}, ptr {place}")
