"""Column reductions: accumulators are rows of memory, the loop over columns is innermost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stator.codegen.llvm.emitter import PRIM_OF, VECTOR_BYTES, Emitter, is_short, neutral
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.shape import cost_of, has_vectors, widest
from stator.codegen.llvm.sums import count_of, has_few_terms, total_type
from stator.codegen.llvm.types import MEMORY, convert, to_memory
from stator.codegen.llvm.writer import SCALAR, Vectors
from stator.core.dtypes import DType
from stator.loops.index import (
    Axis,
    Index,
)
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
    Buffer,
    Cast,
    Combine,
    Expr,
    Kernel,
    Load,
    Stage,
    Store,
    Within,
    children,
    walk,
)
from stator.schedule.columns import block_width

STRETCH: Final = 16  # rows that one partial sum of a column takes in
MOST_IN_REGISTERS: Final = 16 * VECTOR_BYTES  # half of what the widest processors have
MOST_WRITTEN_OUT: Final = 128  # operations on a line of a block, in vectors


@dataclass(frozen=True, slots=True)
class Row:
    """Accumulators in memory, one for each column of a block."""

    place: str
    dtype: DType


def _steady(stage: Stage) -> list[Expr]:
    """The largest computations in a stage that are the same in all of its rows."""
    found: dict[Expr, None] = {}
    stack = [statement.value for statement in stage.body]
    while stack:
        expr = stack.pop()
        if isinstance(expr, Within):
            continue  # what a choice leaves out may not be read
        if not isinstance(expr, Apply | Cast) or _changes(expr, stage):
            stack += children(expr)
        elif isinstance(expr, Apply) or isinstance(expr.value, Apply):
            found[expr] = None
    return list(found)


def _changes(expr: Expr, stage: Stage) -> bool:
    """Whether an expression may come out differently in another row of the stage."""
    if expr.leaves & set(stage.inner):
        return True
    totals = {s.name for s in stage.body if isinstance(s, Accumulate)}
    stored = {s.buffer for s in stage.body if isinstance(s, Store)}
    return any(
        (isinstance(node, Accumulated) and node.name in totals)
        or (isinstance(node, Load) and node.buffer in stored)
        or isinstance(node, Within)
        for node in walk(expr)
    )


def _fits_registers(kernel: Kernel) -> bool:
    """Whether what whole blocks of columns add up stays in registers, line after line.

    In memory each line would wait for what the one before it has stored.
    """
    if is_short(kernel.outer[-1]):
        return False
    width = block_width(kernel)
    for stage in kernel.stages:
        sums = [s for s in stage.body if isinstance(s, Accumulate)]
        if not sums or not stage.inner:
            continue
        if stage.in_order or not has_vectors(stage.body, kernel.outer[-1]):
            return False
        if width * sum(_part_type(s, stage).bytes for s in sums) > MOST_IN_REGISTERS:
            return False
        if width * widest(stage.body) * cost_of(stage.body) > MOST_WRITTEN_OUT * VECTOR_BYTES:
            return False
    return True


def _part_type(statement: Accumulate, stage: Stage) -> DType:
    """The type of a part: few terms are added in the type of the total."""
    return total_type(statement, stage) if has_few_terms(stage) else statement.value.dtype


def _has_parts(stage: Stage, has_whole: bool) -> bool:
    """Whether terms are added to parts of totals: to keep roundings small, or in registers."""
    if not any(isinstance(s, Accumulate) for s in stage.body):
        return False
    return not has_few_terms(stage) or (has_whole and not stage.in_order)


@dataclass(slots=True)
class Columns(Emitter):
    """Writes the loops of a kernel that reduces across its last outer axis."""

    steady: dict[Expr, Row] = field(default_factory=dict)  # what the present stage found computed
    totals: dict[str, Row] = field(default_factory=dict)
    parts: dict[str, Row] = field(default_factory=dict)  # of one stretch, where there are any
    is_whole: bool = False  # whether the present block has all its columns
    has_whole: bool = field(init=False)  # whether such blocks have loops of their own

    def __post_init__(self) -> None:
        self.has_whole = _fits_registers(self.kernel)

    @property
    def width(self) -> int:
        """Columns of a block."""
        return block_width(self.kernel)

    def emit(self) -> None:
        """Blocks of the last outer axis; accumulators are rows of memory."""
        *rows, last = self.kernel.outer
        w = self.w
        length = self.index(last.size)
        for stage in self.kernel.stages:
            for statement in stage.body:
                if isinstance(statement, Accumulate):
                    self._open_rows(stage, statement)
        rows_of = [self._open_steady(stage) for stage in self.kernel.stages]
        padded = w.let(f"add i64 {length}, {self.width - 1}")
        blocks = w.let(f"udiv i64 {padded}, {self.width}")
        with w.loop("%begin", "%end", [], "block") as loop:
            row_number = w.let(f"udiv i64 {loop.counter}, {blocks}")
            block = w.let(f"urem i64 {loop.counter}, {blocks}")
            self._decode(tuple(rows), row_number)
            start = w.let(f"mul i64 {block}, {self.width}")
            rest = w.let(f"sub i64 {length}, {start}")

            def emit(width: str, is_whole: bool = False) -> None:
                self.is_whole = is_whole
                for stage, steady in zip(self.kernel.stages, rows_of, strict=True):
                    self._compute_steady(steady, last, start, width)
                    self.steady = steady
                    self._column_stage(stage, last, start, width)
                    self.steady = {}

            whole, part = str(self.width), self._clip(rest, str(self.width), larger=False)
            if not self.has_whole:
                emit(part)
            elif (last.size % self.width).constant == 0:
                emit(whole, is_whole=True)
            else:
                fills = w.let(f"icmp eq i64 {part}, {whole}")
                self._either(fills, lambda: emit(whole, is_whole=True), lambda: emit(part))

    def _open_steady(self, stage: Stage) -> dict[Expr, Row]:
        """Memory for what is the same in all rows of a stage: it is computed once a column."""
        if not stage.inner:
            return {}
        return {expr: self._row(expr.dtype) for expr in _steady(stage)}

    def _compute_steady(
        self, steady: Mapping[Expr, Row], last: Axis, start: str, width: str
    ) -> None:
        if not steady:
            return
        # As a sum of them would be: the same rules say what becomes vectors.
        body = [Accumulate("steady", Combine.SUM, expr) for expr in steady]
        with self.w.loop("0", width, [], "steady", self._vectors(last, body)) as loop:
            self.lane = loop.counter
            self._enter(last, self.w.let(f"add i64 {start}, {loop.counter}"))
            for expr, row in steady.items():
                self._put(row, self.value(expr))
            self.lane = None
        self.values.clear()

    def _compute(self, expr: Expr) -> str:
        row = self.steady.get(expr)
        if row is None or self.lane is None:
            return Emitter._compute(self, expr)
        return self._lane_of(row.place, row.dtype)

    def _open_rows(self, stage: Stage, statement: Accumulate) -> None:
        self.totals[statement.name] = self._row(total_type(statement, stage))
        if _has_parts(stage, self.has_whole):
            self.parts[statement.name] = self._row(_part_type(statement, stage))

    def _line(self, row: Row, is_part: bool = False) -> Vectors:
        """Those of a loop over accumulators alone: none where a block never fills one."""
        if is_short(self.kernel.outer[-1]):
            return SCALAR
        return Vectors(VECTOR_BYTES // row.dtype.bytes, 2, is_part and self.is_whole)

    def _across(self, last: Axis, stage: Stage) -> Vectors:
        """Those of a line of a block: of a whole one all side by side, parts in registers."""
        vectors = self._vectors(last, stage.body)
        is_written_out = self.is_whole and _has_parts(stage, self.has_whole)
        return Vectors(vectors.lanes, written_out=True) if is_written_out else vectors

    def _row(self, dtype: DType) -> Row:
        return Row(self.w.let(f"alloca [{self.width} x {MEMORY[dtype]}], align 64"), dtype)

    def open_scratch(self, buffer: Buffer) -> None:
        """Memory for one block of columns: all that they keep at a place lies together."""
        kind, size = MEMORY[buffer.dtype], buffer.size.constant
        if size is not None:
            self.w.line(f"%{buffer.name} = alloca [{size * self.width} x {kind}], align 64")
            return
        line = self.width * buffer.dtype.bytes
        length = self.w.let(f"mul i64 {self.index(buffer.size)}, {line}")
        self.w.line(f"%{buffer.name} = call ptr @malloc(i64 {length})")

    def _address(self, buffer: Buffer, index: Index) -> str:
        if not buffer.is_scratch:
            return Emitter._address(self, buffer, index)
        line = self.w.let(f"mul i64 {self.index(index)}, {self.width}")
        place = self.w.let(f"add i64 {line}, {self.lane}")
        return self.w.let(f"getelementptr {MEMORY[buffer.dtype]}, ptr %{buffer.name}, i64 {place}")

    def _accumulated(self, expr: Accumulated) -> str:
        row = self.totals[expr.name]
        return convert(self.w, self._lane_of(row.place, row.dtype), row.dtype, expr.dtype)

    def _column_stage(self, stage: Stage, last: Axis, start: str, width: str) -> None:
        """Rows into accumulators: by stretches of rows, so that no partial sum grows long."""
        accumulations = [s for s in stage.body if isinstance(s, Accumulate)]
        for statement in accumulations:
            self._clear(self.totals[statement.name], statement.combine, width)

        def innermost() -> None:
            vectors = self._across(last, stage)
            with self.w.loop("0", width, [], "column", vectors) as loop:
                self.lane = loop.counter
                self._enter(last, self.w.let(f"add i64 {start}, {loop.counter}"))
                for statement in stage.body:
                    if isinstance(statement, Store):
                        self._store(statement)
                    else:
                        row = self.parts.get(statement.name, self.totals[statement.name])
                        value, dtype = self.value(statement.value), statement.value.dtype
                        self._into(row, statement, convert(self.w, value, dtype, row.dtype))
                self.lane = None

        if not accumulations or not _has_parts(stage, self.has_whole):
            self._nest(stage.inner, innermost)
        elif has_few_terms(stage):
            self._stretch(accumulations, width, lambda: self._nest(stage.inner, innermost))
        else:
            self._stretches(stage.inner, accumulations, width, innermost)
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
        beyond = count_of(axes[1:])  # rows for each step of the first axis
        if beyond is None or beyond > STRETCH:
            with w.loop("0", length, [], "inner") as loop:
                self._enter(axes[0], loop.counter)
                self._stretches(axes[1:], accumulations, width, innermost)
            return
        steps = max(STRETCH // max(beyond, 1), 1)
        padded = w.let(f"add i64 {length}, {steps - 1}")
        count = w.let(f"udiv i64 {padded}, {steps}")
        with w.loop("0", count, [], "stretch") as loop:
            low = w.let(f"mul i64 {loop.counter}, {steps}")
            high = self._clip(w.let(f"add i64 {low}, {steps}"), length, larger=False)

            def rows() -> None:
                with w.loop(low, high, [], "inner") as inner:
                    self._enter(axes[0], inner.counter)
                    self._nest(axes[1:], innermost)

            self._stretch(accumulations, width, rows)

    def _stretch(
        self, accumulations: list[Accumulate], width: str, rows: Callable[[], None]
    ) -> None:
        """What `rows` adds up goes into parts, and these into the totals."""
        for statement in accumulations:
            self._clear(self.parts[statement.name], statement.combine, width, is_part=True)
        rows()
        self.values.clear()
        for statement in accumulations:
            self._put_away(statement, width)

    def _put_away(self, statement: Accumulate, width: str) -> None:
        """Add the parts of one stretch to the totals."""
        parts, totals = self.parts[statement.name], self.totals[statement.name]
        with self.w.loop("0", width, [], "column", self._line(totals, is_part=True)) as column:
            self.lane = column.counter
            part = self._lane_of(parts.place, parts.dtype)
            self._into(totals, statement, convert(self.w, part, parts.dtype, totals.dtype))
            self.lane = None

    def _clear(self, row: Row, combine: Combine, width: str, is_part: bool = False) -> None:
        kind = MEMORY[row.dtype]
        with self.w.loop("0", width, [], "clear", self._line(row, is_part)) as loop:
            place = self.w.let(f"getelementptr {kind}, ptr {row.place}, i64 {loop.counter}")
            value = to_memory(self.w, neutral(combine, row.dtype), row.dtype)
            self.w.line(f"store {kind} {value}, ptr {place}")

    def _into(self, row: Row, statement: Accumulate, term: str) -> None:
        before = self._lane_of(row.place, row.dtype)
        self._put(row, emit_prim(self.w, PRIM_OF[statement.combine], [before, term], row.dtype))

    def _put(self, row: Row, value: str) -> None:
        kind = MEMORY[row.dtype]
        place = self.w.let(f"getelementptr {kind}, ptr {row.place}, i64 {self.lane}")
        self.w.line(f"store {kind} {to_memory(self.w, value, row.dtype)}, ptr {place}")
