"""Rows: outer iterations one after the other, each with all of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stator.codegen.llvm.emitter import PRIM_OF, Emitter, is_computed, is_short, neutral
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.shape import MATH_COST, cost_of
from stator.codegen.llvm.sums import is_direct, part_type, total_type
from stator.codegen.llvm.types import convert, register
from stator.codegen.llvm.writer import SCALAR, Vectors
from stator.core.dtypes import DType
from stator.loops.access import nodes
from stator.loops.index import Axis, Index
from stator.loops.ir import (
    Accumulate,
    Combine,
    Load,
    Stage,
    Store,
)

CHUNK: Final = 1024  # elements summed before a partial sum is put away: it keeps sums exact enough
LINE: Final = 64  # bytes that memory is fetched in
STEP: Final = 64  # elements that one step of the vectors takes, at most


@dataclass(slots=True)
class Rows(Emitter):
    """Writes the loops of a kernel that has inner axes."""

    row: str = ""  # the present outer iteration

    def emit(self) -> None:
        """One outer iteration after the other, each with all of its stages."""
        with self._row_loop(self.kernel.outer, "%begin", "%end") as loop:
            self.row = loop.counter
            for stage in self.kernel.stages:
                self._stage(stage)

    # --- stages of rows ---

    def _stage(self, stage: Stage) -> None:
        accumulations = [s for s in stage.body if isinstance(s, Accumulate)]
        start = [neutral(s.combine, total_type(s, stage)) for s in accumulations]
        final = self._inner(stage, stage.inner, start, accumulations)
        self.values.clear()  # what was computed inside of the loops is not in scope behind them
        for statement, value in zip(accumulations, final, strict=True):
            self.accumulators[statement.name] = self._rounded(stage, statement, value)

    def _rounded(self, stage: Stage, statement: Accumulate, total: str) -> str:
        return convert(self.w, total, total_type(statement, stage), statement.value.dtype)

    def _inner(
        self,
        stage: Stage,
        axes: tuple[Axis, ...],
        start: list[str],
        accumulations: list[Accumulate],
    ) -> list[str]:
        """Loops over `axes`, carrying totals; returns their values behind the loops."""
        if not axes:
            return self._point(stage, start)
        axis, *rest = axes
        if not rest and accumulations and not is_direct(stage):
            return self._chunks(stage, axis, start, accumulations)
        if (
            not rest and not accumulations and is_short(axis)
        ):  # to choose at each point is less code
            self._stores(stage, axis)
            return []
        if not rest and not accumulations:
            self.versions(stage.body, axis, lambda: self._stores(stage, axis))
            return []
        kinds = [register(total_type(s, stage)) for s in accumulations]
        vectors = SCALAR if rest or stage.in_order else self._vectors(axis, stage.body)
        carried = list(zip(kinds, start, strict=True))
        with self.w.loop("0", self.index(axis.size), carried, "inner", vectors) as loop:
            self._enter(axis, loop.counter)
            loop.carried = self._inner(stage, tuple(rest), loop.carried, accumulations)
        return loop.results

    def _stores(self, stage: Stage, axis: Axis) -> None:
        """The innermost loop of a stage that accumulates nothing."""
        bounds = "0", self.index(axis.size)
        self._vector_loops(axis, bounds, stage.body, lambda: self._point(stage, []))

    def _chunks(
        self, stage: Stage, axis: Axis, start: list[str], accumulations: list[Accumulate]
    ) -> list[str]:
        """A loop in chunks, each of which makes a part of the totals."""
        size, end = axis.size.constant, self.index(axis.size)
        # What fills no step of vectors is a chunk of its own: else LLVM adds it to the sum of all
        # the rest, one by one.
        length = self._in_steps(end) if size is None else str(size - size % STEP)
        if size is None or size - size % STEP > CHUNK:
            totals = self._full_chunks(stage, axis, length, start, accumulations)
        else:
            parts = self._parts(stage, axis, ("0", length), accumulations)
            totals = self._totals(stage, accumulations, start, parts)
        if size is None or size % STEP:
            parts = self._parts(stage, axis, (length, end), accumulations, copies=False)
            totals = self._totals(stage, accumulations, totals, parts)
        return totals

    def _in_steps(self, length: str) -> str:
        """`length` without what fills no step."""
        rest = self.w.let(f"urem i64 {length}, {STEP}")
        return self.w.let(f"sub i64 {length}, {rest}")

    def _full_chunks(
        self,
        stage: Stage,
        axis: Axis,
        length: str,
        start: list[str],
        accumulations: list[Accumulate],
    ) -> list[str]:
        w = self.w
        kinds = [register(total_type(s, stage)) for s in accumulations]
        padded = w.let(f"add i64 {length}, {CHUNK - 1}")
        chunks = w.let(f"udiv i64 {padded}, {CHUNK}")
        with w.loop("0", chunks, list(zip(kinds, start, strict=True)), "chunk") as loop:
            low = w.let(f"mul i64 {loop.counter}, {CHUNK}")
            high = self._clip(w.let(f"add i64 {low}, {CHUNK}"), length, larger=False)
            self._fetch_ahead(stage, low)
            parts = self._parts(stage, axis, (low, high), accumulations)
            loop.carried = self._totals(stage, accumulations, loop.carried, parts)
        return loop.results

    def _fetch_ahead(self, stage: Stage, low: str) -> None:
        """Bring a chunk of the next row near while this one keeps the processor busy."""
        first, w = next(s for s in self.kernel.stages if s.inner), self.w
        if stage is first or len(first.inner) != 1 or cost_of(stage.body) < MATH_COST:
            return
        (axis,) = first.inner
        outer = set(self.kernel.outer)
        loads = {
            node: None
            for statement in first.body
            for node in nodes(statement)
            if isinstance(node, Load) and node.index.factor_of(axis) is Index.of(1)
        }
        here = dict(self.axes)
        self._decode(self.kernel.outer, w.let(f"add i64 {self.row}, 1"))
        for load in loads:
            if load.buffer.is_scratch or not load.index.axes & outer:
                continue
            if is_computed(load.index):  # behind the last row, what it is computed of ends
                continue
            line = LINE // load.buffer.dtype.bytes
            with w.loop("0", str(CHUNK // line), [], "ahead") as loop:
                place = w.let(f"mul i64 {loop.counter}, {line}")
                self._enter(axis, w.let(f"add i64 {low}, {place}"))
                address = self._address(load.buffer, load.index)
                w.line(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 2, i32 1)")
        self.axes = here
        self.values.clear()

    def _parts(
        self,
        stage: Stage,
        axis: Axis,
        bounds: tuple[str, str],
        accumulations: list[Accumulate],
        *,
        copies: bool = True,
    ) -> list[str]:
        """What the loop from one bound to the other accumulates, from the neutral values."""
        types = [part_type(s, stage) for s in accumulations]
        fresh = [neutral(s.combine, kind) for s, kind in zip(accumulations, types, strict=True)]
        carried = list(zip(map(register, types), fresh, strict=True))
        vectors = self._vectors(axis, stage.body)
        if not copies:
            vectors = Vectors(vectors.lanes)
        with self.w.loop(*bounds, carried, "inner", vectors) as loop:
            self._enter(axis, loop.counter)
            loop.carried = self._point(stage, loop.carried)
        return loop.results

    def _totals(
        self, stage: Stage, accumulations: list[Accumulate], totals: list[str], parts: list[str]
    ) -> list[str]:
        """Totals with one more part each."""
        found = []
        for statement, total, part in zip(accumulations, totals, parts, strict=True):
            kind = total_type(statement, stage)
            wide = convert(self.w, part, part_type(statement, stage), kind)
            found.append(emit_prim(self.w, PRIM_OF[statement.combine], [total, wide], kind))
        return found

    def _point(self, stage: Stage, carried: list[str]) -> list[str]:
        """Statements at one point of the inner axes."""
        values = iter(carried)
        following = []
        for statement in stage.body:
            if isinstance(statement, Store):
                self._store(statement)
            else:
                kind = part_type(statement, stage)
                term = self.value(statement.value)
                value = convert(self.w, term, statement.value.dtype, kind)
                total = self._combine(statement.combine, next(values), value, kind)
                following.append(total)
                if stage.in_order:
                    running = self._rounded(stage, statement, total)
                    self.accumulators[statement.name] = running
        return following

    def _combine(self, combine: Combine, total: str, value: str, dtype: DType) -> str:
        if combine in (Combine.SUM, Combine.PROD) and dtype.is_float:
            operation = "fadd" if combine is Combine.SUM else "fmul"
            # Reassociation is what lets the loop become vectors.
            return self.w.let(f"{operation} reassoc {register(dtype)} {total}, {value}")
        if combine in (Combine.MAX, Combine.MIN) and dtype.is_float:
            # Which of two zeros it is costs three instructions more, and nobody asks.
            kind = register(dtype)
            name = f"llvm.{'maximum' if combine is Combine.MAX else 'minimum'}.{dtype}"
            return self.w.let(f"call nsz {kind} @{name}({kind} {total}, {kind} {value})")
        return emit_prim(self.w, PRIM_OF[combine], [total, value], dtype)
