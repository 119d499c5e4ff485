"""A kernel as LLVM text: scalar loops that LLVM's vectoriser takes over.

Where the kernel has no inner axes, the last outer axis is the innermost loop, so that it is the one
that becomes vectors.  Where all of a reduction's reads are contiguous along the last outer axis
(sums over columns), accumulators stand in a row of memory, and the loop over the columns is
innermost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stator.codegen.llvm import math
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.types import MEMORY, convert, from_memory, literal, register, to_memory
from stator.codegen.llvm.writer import Writer
from stator.core.dtypes import DType
from stator.loops.index import (
    Axis,
    Element,
    Index,
    Quotient,
    Remainder,
    Symbol,
    is_at_least,
    lower_bound,
)
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
    Buffer,
    Cast,
    Combine,
    Const,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Store,
    loads_of,
    walk,
)
from stator.loops.prims import Prim

VECTOR_BYTES: Final = 64
FEW: Final = 8  # points that are not worth a vector
COLUMNS: Final = 512  # columns that one outer block of a column reduction handles
STRETCH: Final = 128  # rows that one partial sum of a column takes in
CHUNK: Final = 1024  # elements summed before a partial sum is put away: it keeps sums exact enough

_PRIM_OF: Final = {
    Combine.SUM: Prim.ADD,
    Combine.PROD: Prim.MUL,
    Combine.MAX: Prim.MAX,
    Combine.MIN: Prim.MIN,
    Combine.ANY: Prim.OR,
    Combine.ALL: Prim.AND,
}


def needed_math(kernel: Kernel) -> set[tuple[Prim, DType]]:
    """Math functions that the kernel calls."""
    used = {
        (node.prim, node.args[-1].dtype)
        for statement in kernel.statements
        for node in walk(statement.value)
        if isinstance(node, Apply)
    }
    return {pair for pair in used if pair in math.FUNCTIONS}


def arguments_of(kernel: Kernel) -> tuple[Buffer, ...]:
    """Buffers in the order that the entry takes their addresses."""
    return (*kernel.written, *kernel.read)


def symbols_of(kernel: Kernel) -> tuple[Symbol, ...]:
    """Size symbols in the order that the entry takes them."""
    found: dict[Symbol, None] = {}
    for axis in (*kernel.outer, *(a for stage in kernel.stages for a in stage.inner)):
        _collect(axis.size, found)
    for statement in kernel.statements:
        if isinstance(statement, Store):
            _collect(statement.index, found)
        for node in walk(statement.value):
            if isinstance(node, Load | IndexValue):
                _collect(node.index, found)
    return tuple(sorted(found, key=str))


def _collect(index: Index, found: dict[Symbol, None]) -> None:
    for product, _ in index.terms:
        for atom in product:
            if isinstance(atom, Symbol):
                found[atom] = None
            elif isinstance(atom, Quotient | Remainder):
                _collect(atom.value, found)
                _collect(atom.by, found)
            elif isinstance(atom, Axis):
                _collect(atom.size, found)


def neutral(combine: Combine, dtype: DType) -> str:
    """What an accumulator starts from."""
    if combine in (Combine.SUM, Combine.PROD):
        return literal(combine is Combine.PROD, dtype)
    if combine in (Combine.ANY, Combine.ALL):
        return literal(combine is Combine.ALL, DType.BOOL)
    low = combine is Combine.MAX
    if dtype.is_float:
        return literal(float("-inf") if low else float("inf"), dtype)
    if dtype is DType.BOOL:
        return literal(not low, dtype)
    width = int(register(dtype)[1:])
    if dtype.is_signed:
        return str(-(1 << (width - 1)) if low else (1 << (width - 1)) - 1)
    return str(0 if low else -1)  # all bits set


@dataclass(slots=True)
class Rows:
    """Writes the loops of one kernel."""

    kernel: Kernel
    w: Writer = field(default_factory=Writer)
    axes: dict[Axis, str] = field(default_factory=dict)
    accumulators: dict[str, str] = field(default_factory=dict)  # values, or rows of memory
    values: dict[Expr, str] = field(default_factory=dict)  # computed in the present iteration
    partials: dict[str, str] = field(default_factory=dict)  # rows of memory, of one stretch
    lane: str | None = None  # position in the rows of accumulators, in a column reduction

    def emit(self) -> str:
        """The function's text."""
        kernel = self.kernel
        parameters = [f"ptr noalias %{b.name}" for b in arguments_of(kernel)]
        parameters += [f"i64 %{s.name}" for s in symbols_of(kernel)]
        parameters += ["i64 %begin", "i64 %end"]
        for buffer in kernel.scratch:
            self._scratch(buffer)
        if is_columnar(kernel):
            self._columns()
        elif any(stage.inner for stage in kernel.stages):
            self._rows()
        else:
            self._flat()
        self.w.line("ret void")
        head = f"define internal void @{kernel.name}_rows({', '.join(parameters)}) #0 {{\nentry:"
        return "\n".join((head, *self.w.lines, "}"))

    def _scratch(self, buffer: Buffer) -> None:
        size = buffer.size.constant
        assert size is not None, "the scheduler keeps scratch of symbolic size in memory"
        self.w.line(f"%{buffer.name} = alloca [{size} x {MEMORY[buffer.dtype]}], align 64")

    # --- three shapes of loops ---

    def _flat(self) -> None:
        """No inner axes: rows of the last outer axis, clipped to the stretch at both ends."""
        *rows, last = self.kernel.outer or (Axis("only", Index.of(1)),)
        length = self.index(last.size)
        if not rows:
            with self.w.loop("%begin", "%end", [], "flat", self._lanes(last)) as loop:
                self._enter(last, loop.counter)
                self._body(self.kernel.stages)
            return
        w = self.w
        length = self._clip(length, "1", larger=True)  # of an empty row nothing is asked
        first = w.let(f"udiv i64 %begin, {length}")
        beyond = w.let("sub i64 %end, 1")
        final = w.let(f"udiv i64 {beyond}, {length}")
        stop = w.let(f"add i64 {final}, 1")
        some = w.let("icmp slt i64 %begin, %end")
        stop = w.let(f"select i1 {some}, i64 {stop}, i64 {first}")
        with w.loop(first, stop, [], "row") as loop:
            self._decode(tuple(rows), loop.counter)
            start = w.let(f"mul i64 {loop.counter}, {length}")
            low = self._clip(w.let(f"sub i64 %begin, {start}"), "0", larger=True)
            high = self._clip(w.let(f"sub i64 %end, {start}"), length, larger=False)
            with w.loop(low, high, [], "flat", self._lanes(last)) as inner:
                self._enter(last, inner.counter)
                self._body(self.kernel.stages)

    def _lanes(self, axis: Axis) -> int:
        """Lanes of an innermost loop: a full vector of the widest type in it.

        LLVM is told, not asked: its two cost models may disagree, and a build with assertions then
        ends the process.
        """
        size = axis.size.constant
        widest = max(
            node.dtype.computed_in.bytes
            for statement in self.kernel.statements
            for node in walk(statement.value)
        )
        scalar = (size is not None and size < FEW) or not _has_vectors(self.kernel)
        return 0 if scalar else VECTOR_BYTES // widest

    def _clip(self, value: str, bound: str, *, larger: bool) -> str:
        predicate = "sgt" if larger else "slt"
        keep = self.w.let(f"icmp {predicate} i64 {value}, {bound}")
        return self.w.let(f"select i1 {keep}, i64 {value}, i64 {bound}")

    def _rows(self) -> None:
        """One outer iteration after the other, each with all of its stages."""
        with self.w.loop("%begin", "%end", [], "row") as loop:
            self._decode(self.kernel.outer, loop.counter)
            for stage in self.kernel.stages:
                self._stage(stage)

    def _columns(self) -> None:
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
            with self.w.loop("0", width, [], "column", self._lanes(last)) as loop:
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
        after = emit_prim(self.w, _PRIM_OF[statement.combine], [before, value], dtype)
        kind = MEMORY[dtype]
        place = self.w.let(f"getelementptr {kind}, ptr {row}, i64 {self.lane}")
        self.w.line(f"store {kind} {to_memory(self.w, after, dtype)}, ptr {place}")

    def _lane_of(self, row: str, dtype: DType) -> str:
        kind = MEMORY[dtype.computed_in]
        place = self.w.let(f"getelementptr {kind}, ptr {row}, i64 {self.lane}")
        return from_memory(self.w, self.w.let(f"load {kind}, ptr {place}"), dtype.computed_in)

    def _nest(self, axes: tuple[Axis, ...], innermost: Callable[[], None]) -> None:
        if not axes:
            innermost()
            return
        with self.w.loop("0", self.index(axes[0].size), [], "inner") as loop:
            self._enter(axes[0], loop.counter)
            self._nest(axes[1:], innermost)

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
        if not rest and accumulations and _is_long(axis):
            return self._chunks(stage, axis, start, accumulations)
        lanes = 0 if rest else self._lanes(axis)
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
            with w.loop(low, high, chunk, "inner", self._lanes(axis)) as inner:
                self._enter(axis, inner.counter)
                inner.carried = self._point(stage, inner.carried)
            loop.carried = [
                emit_prim(w, _PRIM_OF[s.combine], [total, part], s.value.dtype)
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
                following.append(self._combine(statement.combine, next(values), value, dtype))
        return following

    def _combine(self, combine: Combine, total: str, value: str, dtype: DType) -> str:
        if combine in (Combine.SUM, Combine.PROD) and dtype.is_float:
            operation = "fadd" if combine is Combine.SUM else "fmul"
            # Reassociation is what lets the loop become vectors.
            return self.w.let(f"{operation} reassoc {register(dtype)} {total}, {value}")
        return emit_prim(self.w, _PRIM_OF[combine], [total, value], dtype)

    def _body(self, stages: tuple[Stage, ...]) -> None:
        for stage in stages:
            for statement in stage.body:
                assert isinstance(statement, Store), "a flat kernel accumulates nothing"
                self._store(statement)

    def _store(self, statement: Store) -> None:
        buffer = statement.buffer
        kind = MEMORY[buffer.dtype]
        value = to_memory(self.w, self.value(statement.value), buffer.dtype)
        address = self._address(buffer, statement.index)
        self.w.line(f"store {kind} {value}, ptr {address}")
        self._forget_loads(buffer)

    def _forget_loads(self, buffer: Buffer) -> None:
        stale = [e for e in self.values if any(x.buffer is buffer for x in loads_of(e))]
        for expr in stale:
            del self.values[expr]

    # --- values ---

    def _enter(self, axis: Axis, counter: str) -> None:
        """`axis` has a new value: what was computed before is no longer in scope."""
        self.axes[axis] = counter
        self.values.clear()

    def _decode(self, axes: tuple[Axis, ...], flat: str) -> None:
        """Axes from a flat count, the last one fastest."""
        for axis in reversed(axes[1:]):
            size = self.index(axis.size)
            self._enter(axis, self.w.let(f"urem i64 {flat}, {size}"))
            flat = self.w.let(f"udiv i64 {flat}, {size}")
        if axes:
            self._enter(axes[0], flat)

    def value(self, expr: Expr) -> str:
        """Code for an expression; the same one is computed once an iteration."""
        if isinstance(expr, Const):
            return literal(expr.value, expr.dtype)
        found = self.values.get(expr)
        if found is None:
            found = self.values[expr] = self._compute(expr)
        return found

    def _compute(self, expr: Expr) -> str:
        match expr:
            case Load():
                kind = MEMORY[expr.buffer.dtype]
                address = self._address(expr.buffer, expr.index)
                loaded = self.w.let(f"load {kind}, ptr {address}")
                return from_memory(self.w, loaded, expr.buffer.dtype)
            case Apply():
                args = [self.value(arg) for arg in expr.args]
                return emit_prim(self.w, expr.prim, args, expr.args[-1].dtype)
            case Cast():
                return convert(self.w, self.value(expr.value), expr.value.dtype, expr.dtype)
            case IndexValue():
                return convert(self.w, self.index(expr.index), DType.I64, expr.dtype)
            case Accumulated():
                return self._accumulated(expr)
            case _:
                raise AssertionError(f"no code for {type(expr).__name__}")

    def _accumulated(self, expr: Accumulated) -> str:
        place = self.accumulators[expr.name]
        return place if self.lane is None else self._lane_of(place, expr.dtype)

    def _address(self, buffer: Buffer, index: Index) -> str:
        offset = self.index(index)
        return self.w.let(f"getelementptr {MEMORY[buffer.dtype]}, ptr %{buffer.name}, i64 {offset}")

    def index(self, index: Index) -> str:
        """Code for an index."""
        if index.constant is not None:
            return str(index.constant)
        total: str | None = None
        for product, factor in index.terms:
            part: str | None = None
            for atom in product:
                value = self._atom(atom)
                part = value if part is None else self.w.let(f"mul nsw i64 {part}, {value}")
            if part is None:
                part = str(factor)
            elif factor != 1:
                part = self.w.let(f"mul nsw i64 {part}, {factor}")
            total = part if total is None else self.w.let(f"add nsw i64 {total}, {part}")
        assert total is not None, "an index without terms is the constant 0"
        return total

    def _atom(self, atom: object) -> str:
        match atom:
            case Axis():
                return self.axes[atom]
            case Symbol():
                return f"%{atom.name}"
            case Quotient():
                return self._divided(atom.value, atom.by, remainder=False)
            case Remainder():
                return self._divided(atom.value, atom.by, remainder=True)
            case Element():
                return convert(self.w, self.value(atom.expr), atom.expr.dtype, DType.I64)
            case _:
                raise AssertionError(f"no code for {atom}")

    def _divided(self, value: Index, by: Index, *, remainder: bool) -> str:
        """Floor division; the machine's own where the value cannot be negative."""
        over, under = self.index(value), self.index(by)
        low = lower_bound(value)
        if low is not None and is_at_least(low, 0):
            return self.w.let(f"{'urem' if remainder else 'udiv'} i64 {over}, {under}")
        rest = self.w.let(f"srem i64 {over}, {under}")
        below = self.w.let(f"icmp slt i64 {rest}, 0")
        if remainder:
            lifted = self.w.let(f"add i64 {rest}, {under}")
            return self.w.let(f"select i1 {below}, i64 {lifted}, i64 {rest}")
        quotient = self.w.let(f"sdiv i64 {over}, {under}")
        lowered = self.w.let(f"sub i64 {quotient}, 1")
        return self.w.let(f"select i1 {below}, i64 {lowered}, i64 {quotient}")


def _has_vectors(kernel: Kernel) -> bool:
    """Whether LLVM can make vectors of it: not of calls to libm, nor of any and all."""
    combines = {s.combine for s in kernel.statements if isinstance(s, Accumulate)}
    if combines & {Combine.ANY, Combine.ALL}:
        return False
    return not any(pair in math.LIBM for pair in needed_math(kernel))


def _is_long(axis: Axis) -> bool:
    size = axis.size.constant
    return size is None or size > CHUNK


def is_columnar(kernel: Kernel) -> bool:
    """Whether the kernel reduces along axes across which its reads jump, not along the last one."""
    if not kernel.outer or kernel.scratch:
        return False
    last = kernel.outer[-1]
    reducing = [stage for stage in kernel.stages if stage.inner]
    if not reducing:
        return False
    for stage in reducing:
        accumulates = [s for s in stage.body if isinstance(s, Accumulate)]
        if not accumulates:
            return False
        for statement in accumulates:
            loads = [x for x in loads_of(statement.value) if x.axes & set(stage.inner)]
            steps = [x.index.factor_of(last) for x in loads]
            if not loads or any(step is None or step.constant != 1 for step in steps):
                return False
    return True


def outer_count(kernel: Kernel) -> Index:
    """How many outer iterations (blocks, in a column reduction) the entry's `count` must say."""
    count = Index.of(1)
    outer = list(kernel.outer)
    if is_columnar(kernel):
        last = outer.pop()
        count = (last.size + (COLUMNS - 1)) // COLUMNS
    for axis in outer:
        count = count * axis.size
    return count
