"""Code for values, indices and stores: what every shape of loops is written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from stator.codegen.llvm.indices import Indices
from stator.codegen.llvm.prims import emit_prim
from stator.codegen.llvm.shape import cost_of, has_vectors, widest
from stator.codegen.llvm.types import MEMORY, convert, from_memory, literal, register, to_memory
from stator.codegen.llvm.writer import SCALAR, Loop, Vectors
from stator.core.dtypes import DType
from stator.loops.access import roots
from stator.loops.index import (
    Axis,
    Clamped,
    Element,
    Index,
    is_at_least,
    upper_bound,
)
from stator.loops.ir import (
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
    Statement,
    Store,
    Within,
    children,
    index_parts,
    loads_of,
)
from stator.loops.prims import Prim

MOST_OUTCOMES: Final = 2  # choices that give loops of their own for each outcome
MOST_NODES: Final = 1024  # or more of them, if all these loops together have no more to compute
VECTOR_BYTES: Final = 64
FEW: Final = 8  # points that are not worth a vector
ENOUGH_AT_ONCE: Final = 48  # operations in flight that hide each other's latency

Condition: TypeAlias = tuple[Index, Index]  # what a choice asks: is the index within the limit?

PRIM_OF: Final = {
    Combine.SUM: Prim.ADD,
    Combine.PROD: Prim.MUL,
    Combine.MAX: Prim.MAX,
    Combine.MIN: Prim.MIN,
    Combine.ANY: Prim.OR,
    Combine.ALL: Prim.MIN,  # of vectors it stays one; LLVM makes single bits of AND
}


def _steady_choices(
    body: Sequence[Statement], axis: Axis, settled: Mapping[Condition, bool]
) -> list[Condition]:
    """Choices still to be made that come out the same along `axis`, outermost first."""
    found: dict[Condition, None] = {}
    seen: set[Expr] = set()
    stack = [root for statement in reversed(body) for root in reversed(roots(statement))]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Within):
            outcome = settled.get((node.index, node.limit))
            if outcome is not None:
                stack.append(node.inside if outcome else node.outside)
                continue
            axes = node.index.axes | node.limit.axes
            if axis not in axes and not is_computed(node.index):
                found[node.index, node.limit] = None
        stack += reversed(children(node))
    return list(found)


def _is_little(body: Sequence[Statement], axis: Axis, settled: Mapping[Condition, bool]) -> bool:
    """Whether loops for all outcomes are little code: as where many tensors are joined.

    Choices that stand inside of each other have as many outcomes as there are choices, and one
    more.  Those of choices that stand side by side double with every one.
    """
    steady = _steady_choices(body, axis, settled)
    sizes = _sizes_of_outcomes(body, axis, settled)
    outcomes = list(islice(sizes, len(steady) + 2))
    return len(outcomes) <= len(steady) + 1 and sum(outcomes) <= MOST_NODES


def _sizes_of_outcomes(
    body: Sequence[Statement], axis: Axis, settled: Mapping[Condition, bool]
) -> Iterator[int]:
    """How many nodes are left to compute, for each way that steady choices come out."""
    steady = _steady_choices(body, axis, settled)
    if not steady:
        yield _count_nodes(body, settled)
        return
    for outcome in (True, False):
        yield from _sizes_of_outcomes(body, axis, {**settled, steady[0]: outcome})


def _count_nodes(body: Sequence[Statement], settled: Mapping[Condition, bool]) -> int:
    """How many nodes there is code for, once these choices are made."""
    seen: set[Expr] = set()
    stack = [root for statement in body for root in roots(statement)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        outcome = settled.get((node.index, node.limit)) if isinstance(node, Within) else None
        if isinstance(node, Within) and outcome is not None:
            stack.append(node.inside if outcome else node.outside)
        else:
            stack += children(node)
    return len(seen)


def is_computed(index: Index) -> bool:
    """Whether the index holds a number that the program computes."""
    return any(isinstance(atom, Element) for atom in index_parts(index))


def is_within_32_bits(expr: Expr) -> bool:
    """Whether limits say that a value, if it is a number, is a signed one of 32 bits."""
    limits: dict[Prim, float] = {}
    while isinstance(expr, Apply) and expr.prim in (Prim.MIN, Prim.MAX):
        inside, limit = expr.args
        if not isinstance(limit, Const):
            return False
        limits.setdefault(expr.prim, float(limit.value))
        expr = inside
    low, high = limits.get(Prim.MAX, -math.inf), limits.get(Prim.MIN, math.inf)
    return low >= -(1 << 31) and high < 1 << 31


def neutral(combine: Combine, dtype: DType) -> str:
    """What an accumulator starts from."""
    if combine not in (Combine.MAX, Combine.MIN):
        return literal(combine in (Combine.PROD, Combine.ALL), dtype)
    low = combine is Combine.MAX
    if dtype.is_float:
        return literal(float("-inf") if low else float("inf"), dtype)
    if dtype is DType.BOOL:
        return literal(not low, dtype)
    width = int(register(dtype)[1:])
    if dtype.is_signed:
        return str(-(1 << (width - 1)) if low else (1 << (width - 1)) - 1)
    return str(0 if low else -1)  # all bits set


def is_short(axis: Axis) -> bool:
    """Whether a loop is known to have too few points for a vector."""
    bounds = [upper_bound(axis.size)]
    for product, _ in axis.size.terms[:1]:
        atom = product[0] if product else None
        if isinstance(atom, Clamped) and axis.size is Index.of(atom) and atom.low.constant == 0:
            bounds.append(atom.value)  # or 0, where that is more
    return any(bound is not None and is_at_least(FEW - bound, 1) for bound in bounds)


def _fits(size: int | None, lanes: int, copies: int) -> bool:
    """Whether `copies` vectors side by side leave no more over than one alone."""
    return size is None or size % (lanes * copies) == size % lanes


@dataclass(slots=True)
class Emitter(Indices):
    """State of the function that is being written, and code for values."""

    kernel: Kernel = field(kw_only=True)
    accumulators: dict[str, str] = field(default_factory=dict)
    values: dict[Expr, str] = field(default_factory=dict)  # computed in the present iteration
    settled: dict[Condition, bool] = field(default_factory=dict)  # choices made outside
    innermost: Axis | None = None  # the axis of the loop that was entered last
    lane: str | None = None  # position among accumulators that lie in memory

    def open_scratch(self, buffer: Buffer) -> None:
        """Memory for one outer iteration: of a known size on the stack."""
        kind, size = MEMORY[buffer.dtype], buffer.size.constant
        if size is not None:
            self.w.line(f"%{buffer.name} = alloca [{size} x {kind}], align 64")
            return
        length = self.w.let(f"mul i64 {self.index(buffer.size)}, {buffer.dtype.bytes}")
        self.w.line(f"%{buffer.name} = call ptr @malloc(i64 {length})")

    def close_scratch(self, buffer: Buffer) -> None:
        """Give back what `open_scratch` took."""
        if buffer.size.constant is None:
            self.w.line(f"call void @free(ptr %{buffer.name})")

    def _vectors(self, axis: Axis, body: Sequence[Statement]) -> Vectors:
        """Those of an innermost loop: as wide as its widest type allows, more than one if short.

        LLVM is told, not asked: its two cost models may disagree, and a build with assertions then
        ends the process.
        """
        size = axis.size.constant
        if is_short(axis) or not has_vectors(body, axis):
            return SCALAR
        lanes, cost = VECTOR_BYTES // widest(body), cost_of(body)
        fitting = (n for n in (4, 2) if n * cost <= ENOUGH_AT_ONCE and _fits(size, lanes, n))
        return Vectors(lanes, next(fitting, 1))

    def _vector_loops(
        self,
        axis: Axis,
        bounds: tuple[str, str],
        body: Sequence[Statement],
        emit: Callable[[], object],
    ) -> None:
        """A loop over `axis`, of vectors where it may be.

        Of unknown length it may be shorter than several vectors side by side, or end with much that
        they leave over: that is a loop of single ones.
        """
        w, vectors, (low, high) = self.w, self._vectors(axis, body), bounds
        stretches = [(low, high, vectors)]
        if axis.size.constant is None and vectors.copies > 1:
            length = w.let(f"sub i64 {high}, {low}")
            rest = w.let(f"srem i64 {length}, {vectors.lanes * vectors.copies}")
            middle = w.let(f"sub i64 {high}, {rest}")
            stretches = [(low, middle, vectors), (middle, high, Vectors(vectors.lanes))]
        for start, end, how in stretches:
            with w.loop(start, end, [], "inner", how) as loop:
                self._enter(axis, loop.counter)
                emit()

    def _nest(self, axes: tuple[Axis, ...], innermost: Callable[[], None]) -> None:
        if not axes:
            innermost()
            return
        with self.w.loop("0", self.index(axes[0].size), [], "inner") as loop:
            self._enter(axes[0], loop.counter)
            self._nest(axes[1:], innermost)

    def _store(self, statement: Store) -> None:
        buffer = statement.buffer
        kind = MEMORY[buffer.dtype]
        value = self.value(statement.value)
        address = self._address(buffer, statement.index)
        if statement.combine is not None:
            before = from_memory(self.w, self.w.let(f"load {kind}, ptr {address}"), buffer.dtype)
            operation = PRIM_OF[statement.combine]
            value = emit_prim(self.w, operation, [before, value], statement.value.dtype)
        value = to_memory(self.w, value, buffer.dtype)
        self.w.line(f"store {kind} {value}, ptr {address}")
        self._forget_loads(buffer)

    def _forget_loads(self, buffer: Buffer) -> None:
        stale = [e for e in self.values if any(x.buffer is buffer for x in loads_of(e))]
        for expr in stale:
            del self.values[expr]

    def _enter(self, axis: Axis, counter: str) -> None:
        """`axis` has a new value: what was computed before is no longer in scope."""
        self.axes[axis] = counter
        self.innermost = axis
        self.values.clear()

    def _decode(self, axes: tuple[Axis, ...], flat: str) -> None:
        """Axes from a flat count, the last one fastest."""
        for axis in reversed(axes[1:]):
            size = self.index(axis.size)
            self._enter(axis, self.w.let(f"urem i64 {flat}, {size}"))
            flat = self.w.let(f"udiv i64 {flat}, {size}")
        if axes:
            self._enter(axes[0], flat)

    @contextmanager
    def _row_loop(self, axes: tuple[Axis, ...], first: str, stop: str) -> Iterator[Loop]:
        """A loop over the flat count of `axes`, which are set inside of it.

        Divisions by numbers are cheap; where there would be others, the axes are counted on.
        """
        if all(axis.size.constant is not None for axis in axes[1:]):
            with self.w.loop(first, stop, [], "row") as loop:
                self._decode(axes, loop.counter)
                yield loop
            return
        start = [("i64", place) for place in self._places(axes, first)]
        with self.w.loop(first, stop, start, "row") as loop:
            places = list(loop.carried)
            for axis, place in zip(axes, places, strict=True):
                self._enter(axis, place)
            yield loop
            loop.carried = self._following(axes, places)

    def _places(self, axes: tuple[Axis, ...], flat: str) -> list[str]:
        """Where the axes stand at a flat count."""
        places = []
        for axis in reversed(axes[1:]):
            # Of an empty axis nothing is asked, but it would be divided by.
            size = self._clip(self.index(axis.size), "1", larger=True)
            places.append(self.w.let(f"urem i64 {flat}, {size}"))
            flat = self.w.let(f"udiv i64 {flat}, {size}")
        return [flat, *reversed(places)]

    def _following(self, axes: tuple[Axis, ...], places: list[str]) -> list[str]:
        """Where the axes stand one point later."""
        found, more = [], "1"
        for axis, place in zip(reversed(axes[1:]), reversed(places[1:]), strict=True):
            ahead = self.w.let(f"add nuw nsw i64 {place}, {more}")
            is_through = self.w.let(f"icmp eq i64 {ahead}, {self.index(axis.size)}")
            found.append(self.w.let(f"select i1 {is_through}, i64 0, i64 {ahead}"))
            more = self.w.let(f"zext i1 {is_through} to i64")
        return [self.w.let(f"add nuw nsw i64 {places[0]}, {more}"), *reversed(found)]

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
                value, is_small = self.value(expr.value), is_within_32_bits(expr.value)
                return convert(self.w, value, expr.value.dtype, expr.dtype, is_small=is_small)
            case IndexValue():
                return convert(self.w, self.index(expr.index), DType.I64, expr.dtype)
            case Accumulated():
                return self._accumulated(expr)
            case Within():
                return self._choice(expr)
            case _:
                raise AssertionError(f"no code for {type(expr).__name__}")

    def _choice(self, expr: Within) -> str:
        """A branch: only the chosen side may load."""
        outcome = self.settled.get((expr.index, expr.limit))
        if outcome is not None:
            return self.value(expr.inside if outcome else expr.outside)
        w, kind = self.w, register(expr.dtype)
        chosen = self._is_within((expr.index, expr.limit))
        known = dict(self.values)
        inside, outside, done = w.name("inside_"), w.name("outside_"), w.name("chosen_")
        w.line(f"br i1 {chosen}, label %{inside}, label %{outside}")
        sides = []
        for label, side in ((inside, expr.inside), (outside, expr.outside)):
            w.open_block(label)
            value = self.value(side)
            sides.append(f"[ {value}, %{w.block} ]")
            w.line(f"br label %{done}")
            self.values = dict(known)  # what one side computed is not in scope behind it
        w.open_block(done)
        return w.let(f"phi {kind} {', '.join(sides)}")

    def versions(self, body: Sequence[Statement], axis: Axis, emit: Callable[[], None]) -> None:
        """Loops over `axis`, once for each outcome of the choices that do not change along it."""
        steady = _steady_choices(body, axis, self.settled)
        if not steady:
            emit()
        elif len(steady) <= MOST_OUTCOMES or _is_little(body, axis, self.settled):
            first = steady[0]
            self._either(
                self._is_within(first),
                lambda: self._settle([first], True, lambda: self.versions(body, axis, emit)),
                lambda: self._settle([first], False, lambda: self.versions(body, axis, emit)),
            )
        else:
            inside = self._is_within(steady[0])
            for condition in steady[1:]:
                inside = self.w.let(f"and i1 {inside}, {self._is_within(condition)}")
            self._either(inside, lambda: self._settle(steady, True, emit), emit)

    def _is_within(self, condition: Condition) -> str:
        index, limit = condition
        # A negative index is a huge one.
        return self.w.let(f"icmp ult i64 {self.index(index)}, {self.index(limit)}")

    def _settle(self, conditions: list[Condition], outcome: bool, emit: Callable[[], None]) -> None:
        before = dict(self.settled)
        self.settled.update(dict.fromkeys(conditions, outcome))
        emit()
        self.settled = before

    def _either(self, condition: str, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Run one of two; what they compute is not in scope behind them."""
        w = self.w
        known = dict(self.values)
        first, second, done = w.name("yes_"), w.name("no_"), w.name("either_")
        w.line(f"br i1 {condition}, label %{first}, label %{second}")
        for label, emit in ((first, yes), (second, no)):
            w.open_block(label)
            emit()
            w.line(f"br label %{done}")
            self.values = dict(known)
        w.open_block(done)

    def _accumulated(self, expr: Accumulated) -> str:
        return self.accumulators[expr.name]

    def _lane_of(self, row: str, dtype: DType) -> str:
        kind = MEMORY[dtype.computed_in]
        place = self.w.let(f"getelementptr {kind}, ptr {row}, i64 {self.lane}")
        return from_memory(self.w, self.w.let(f"load {kind}, ptr {place}"), dtype.computed_in)

    def _address(self, buffer: Buffer, index: Index) -> str:
        for written, read in self.kernel.shares:
            buffer = written if buffer is read else buffer
        kind, step = MEMORY[buffer.dtype], None
        if self.innermost is not None:
            step = index.factor_of(self.innermost)
        if self.innermost is None or step is None or not step.terms:
            return self.w.let(f"getelementptr {kind}, ptr %{buffer.name}, i64 {self.index(index)}")
        moving = step * self.innermost
        first = self.index(index - moving)
        base = self.w.let(f"getelementptr {kind}, ptr %{buffer.name}, i64 {first}")
        # Told that addresses do not wrap around, LLVM loads every second element without gathering;
        # it keeps that in mind where all that the loop adds stands alone.
        return self.w.let(f"getelementptr nusw {kind}, ptr {base}, i64 {self.index(moving)}")

    def _element(self, element: Element) -> str:
        return convert(self.w, self.value(element.expr), element.expr.dtype, DType.I64)
