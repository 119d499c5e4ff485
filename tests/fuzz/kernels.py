"""Random kernels that verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from hypothesis import strategies as st

from stator.core.dtypes import DType
from stator.loops.access import nodes
from stator.loops.build import apply, const
from stator.loops.index import Axis, Index, Symbol
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Buffer,
    Combine,
    Expr,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
)
from stator.loops.prims import Prim
from tests.fuzz.accesses import (
    Range,
    column_index,
    combined_index,
    flat,
    loaded_index,
    stored_index,
    turned_index,
)
from tests.fuzz.choices import Choices, Draw, Drawn
from tests.fuzz.compare import EXACT
from tests.fuzz.expressions import (
    ARITHMETIC,
    HALVES,
    LIMIT,
    STEP,
    Expressions,
    Known,
    Trust,
    on_grid,
)

SIZES: Final = (2, 3, 1, 5, 7, 8, 16, 17, 31, 33)
LONG: Final = (65, 100, 260, 513, 1025, 1030)  # more than backends take in one block
SQUARES: Final = (16, 17)
ROOM: Final = 120  # points that a stage may have where no size is long: the interpreter is slow
NAMES: Final = 10  # buffers and accumulators after which nothing is added: LLVM is slow as well
STORED: Final = (*ARITHMETIC, *HALVES, *HALVES)


class Form(Enum):
    """What a kernel looks like, so that every shape of loops that backends know gets its share."""

    ANY = auto()
    SCAN = auto()  # one stage in order
    COLUMNS = auto()  # memory lies along the last outer axis, stages go across it
    TURNED = auto()  # no inner axes; some loads lie along another axis than the last


@st.composite
def kernels(draw: Draw) -> Kernel:
    """What `make_kernel` makes, for Hypothesis."""
    return make_kernel(Drawn(draw))


def make_kernel(choices: Choices) -> Kernel:
    """A kernel of up to three outer axes and one to three stages that verifies."""
    form = choices.one_of((*(Form.ANY,) * 5, Form.SCAN, Form.COLUMNS, Form.TURNED))
    return _Maker(choices, form).kernel()


@dataclass
class _Maker:
    choices: Choices
    form: Form
    count: int = 0  # of names given
    room: int = ROOM  # what the sizes still to be drawn may multiply to
    accumulated: list[Known] = field(default_factory=list)
    # What later stages over the same inner axes may load: scratch, and elements just stored.
    left: list[tuple[tuple[Axis, ...], Known]] = field(default_factory=list)
    shares: list[tuple[Buffer, Buffer]] = field(default_factory=list)

    def kernel(self) -> Kernel:
        outer = self.outer()
        room = self.room
        inner: tuple[Axis, ...] = ()
        stages: list[Stage] = []
        for _ in range(1 if self.form is Form.SCAN else self.choices.one_of((1, 2, 1, 1, 1, 3))):
            if self.is_enough():
                break
            self.room = room
            if not stages or self.choices.chance(3):
                inner = self.inner(len(outer))
            stages.append(self.stage(outer, inner))
        is_list = self.choices.chance(8)
        stages += self.unread(outer, stages)
        return Kernel("fuzzed", outer, tuple(stages), tuple(self.shares), is_list)

    def outer(self) -> tuple[Axis, ...]:
        if self.form is Form.TURNED:
            sizes = [self.choices.one_of(SQUARES), self.choices.one_of(SQUARES)]
            axes = [Axis(f"i{n}", Index.of(size)) for n, size in enumerate(sizes)]
            if self.choices.chance(4):
                axes.insert(1, Axis("i2", Index.of(2)))
            return tuple(axes)
        count = self.choices.one_of((1, 2, 1, 3, 0) if self.form is Form.ANY else (1, 2))
        return tuple(self.axis(f"i{n}") for n in range(count))

    def inner(self, number: int) -> tuple[Axis, ...]:
        counts = {Form.SCAN: (1,), Form.COLUMNS: (1, 1, 2), Form.TURNED: (0,)}
        count = self.choices.one_of(counts.get(self.form, (0, 1, 1, 2)))
        return tuple(self.axis(f"i{number + n}") for n in range(count))

    def unread(self, outer: tuple[Axis, ...], stages: list[Stage]) -> list[Stage]:
        """Stages that store what no stage has read, so that nothing is computed in vain."""
        read = {node for stage in stages for s in stage.body for node in nodes(s)}
        scratch = [(i, k) for i, k in self.left if _is_scratch(k.expr)]
        left = [((), known) for known in self.accumulated] + scratch
        return [
            Stage(inner, (self.store(known, (*outer, *inner), known.dtype),))
            for inner, known in left
            if known.expr not in read
        ]

    def depth(self) -> int:
        return self.choices.one_of((1, 2))

    def is_enough(self) -> bool:
        return self.count >= NAMES

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def axis(self, name: str) -> Axis:
        if self.choices.chance(4):
            one, other = Index.of(Symbol("s0")), Index.of(Symbol("s1"))
            self.room //= 6
            return Axis(name, self.choices.one_of((one, one, other, 2 * one, one + 3, one * other)))
        sizes = [size for size in SIZES if size <= self.room] or [1]
        if self.room == ROOM and self.choices.chance(16):
            sizes = list(LONG)
        size = self.choices.one_of(sizes)
        self.room //= min(size, ROOM)
        return Axis(name, Index.of(size))

    def expressions(self, outer: tuple[Axis, ...], inner: tuple[Axis, ...]) -> Expressions:
        """A maker of expressions that sees what earlier stages left."""
        known = [*self.accumulated, *(known for own, known in self.left if own == inner)]
        made = Expressions(self.choices, (*outer, *inner), self.fresh, known)
        made.is_enough = self.is_enough
        if self.form is Form.COLUMNS:
            made.axes, made.places = (*outer[:-1], *inner, outer[-1]), column_index
        elif self.form is Form.TURNED:
            made.places, made.may_choose = turned_index, self.choices.chance(4)
        return made

    def stage(self, outer: tuple[Axis, ...], inner: tuple[Axis, ...]) -> Stage:
        made = self.expressions(outer, inner)
        in_order = bool(inner) and (self.form is Form.SCAN or self.choices.chance(4))
        body: list[Statement] = []
        accumulated: list[Known] = []
        for number in range(self.choices.one_of((1, 2, 1, 1, 3))):
            if body and self.is_enough():
                break
            kind = self.choices.below(8)
            if inner and (kind <= 2 or (self.form is not Form.ANY and number == 0)):
                statement, total = self.accumulate(made)
                body.append(statement)
                accumulated.append(total)
                if in_order:
                    made.known += [total] * 2
                    body.append(self.store(total, made.axes, total.dtype))
            elif kind == 4:
                body.append(self.keep(made, inner))
            elif kind == 5:
                body += self.update(made, made.axes)
            elif kind == 6:
                body.append(self.combine(made, outer, inner, in_order))
            else:
                body += self.stores(made, outer, inner, in_order)
        self.accumulated += accumulated
        return Stage(inner, tuple(body), in_order)

    # --- statements ---

    def accumulate(self, made: Expressions) -> tuple[Accumulate, Known]:
        name = self.fresh("acc")
        value = made.make(self.choices.one_of(ARITHMETIC), self.depth())
        combine = self.kind(value.dtype)
        expr, trust = self.combinable(made, value, combine, exact=False)
        known = Known(Accumulated(value.dtype, name), min(trust, Trust.VALUE))
        return Accumulate(name, combine, expr), known

    def kind(self, dtype: DType) -> Combine:
        if dtype is DType.BOOL:
            return self.choices.one_of((Combine.ANY, Combine.ALL, Combine.MAX, Combine.MIN))
        return self.choices.one_of((Combine.SUM, Combine.MAX, Combine.MIN, Combine.PROD))

    def combinable(
        self, made: Expressions, value: Known, combine: Combine, *, exact: bool
    ) -> tuple[Expr, Trust]:
        """What may be combined, in any order unless it is `exact`, and the trust in the result."""
        dtype, trust = value.dtype, value.trust
        if dtype.is_float and combine is Combine.PROD:
            near_one = made.grid(dtype, 1).expr  # so that no order overflows
            return apply(Prim.FMA, near_one, 1 / 1024, const(1.0, dtype)), Trust.NEAR
        if dtype.is_float and combine is Combine.SUM:
            bits = 13 if dtype is DType.F32 else 40
            if trust is Trust.NEAR or not (exact or value.sums_exactly(bits)):
                return apply(Prim.ABS, value.expr), Trust.NEAR  # nothing cancels
        return value.expr, trust

    def keep(self, made: Expressions, inner: tuple[Axis, ...]) -> Store:
        """A store to scratch; the stages that follow may load it."""
        value = made.make(self.choices.one_of(ARITHMETIC), self.depth())
        dtype = value.dtype
        if dtype is DType.F32 and value.trust >= Trust.VALUE:
            dtype = self.choices.one_of((DType.F32, *HALVES))
        index, length = flat([(Index.of(axis), axis.size) for axis in inner])
        buffer = Buffer(self.fresh("kept"), dtype, length, is_scratch=True)
        known = Known(Load(value.dtype, buffer, index), value.trust)
        made.known.append(known)
        if inner and self.choices.chance(2):
            # For later stages: in this one it is not there yet.
            known = Known(Load(value.dtype, buffer, length - 1 - index), value.trust)
        self.left.append((inner, known))
        return Store(buffer, index, value.expr)

    def stored(self, axes: Sequence[Axis]) -> Range:
        """Where results go: in the order of the axes where the form of the kernel needs it."""
        if self.form is Form.ANY or self.choices.chance(8):
            return stored_index(self.choices, axes)
        return flat([(Index.of(axis), axis.size) for axis in axes])

    def store(self, value: Known, axes: Sequence[Axis], dtype: DType) -> Store:
        index, length = self.stored(axes)
        name = EXACT if value.trust >= Trust.VALUE else "near"
        return Store(Buffer(self.fresh(name), dtype, length), index, value.expr)

    def stores(
        self, made: Expressions, outer: tuple[Axis, ...], inner: tuple[Axis, ...], in_order: bool
    ) -> list[Statement]:
        """A store; or one to a computed place; or two to the two halves of one buffer."""
        dtype = self.choices.one_of(STORED)
        value = made.make(dtype.computed_in, self.depth())
        first = self.store(value, made.axes, dtype)
        kind = self.choices.below(6)
        if kind == 3 and in_order:
            index, length = combined_index(self.choices, outer, self.place(inner))
            buffer = Buffer(first.buffer.name, dtype, length)
            return [Store(buffer, index, value.expr)]
        if kind == 4:
            second = made.make(dtype.computed_in, 1)
            half = first.buffer.size
            name = "near" if Trust.NEAR in (value.trust, second.trust) else EXACT
            buffer = Buffer(self.fresh(name), dtype, 2 * half)
            return [
                Store(buffer, first.index, value.expr),
                Store(buffer, first.index + half, second.expr),
            ]
        if kind == 5 and (dtype not in HALVES or value.trust >= Trust.VALUE):
            known = Known(Load(dtype.computed_in, first.buffer, first.index), value.trust)
            made.known += [known] * 2
            self.left.append((inner, known))
        return [first]

    def update(self, made: Expressions, axes: Sequence[Axis]) -> list[Statement]:
        """A store to what the same statement loads, and perhaps one of what it left.

        The load may name another buffer, which lies in the same memory.
        """
        dtype = self.choices.one_of(STORED)
        index, length = self.stored(axes)
        buffer = Buffer(self.fresh("own"), dtype, length)
        old = Buffer(self.fresh("old"), dtype, length) if self.choices.chance(3) else buffer
        before = Load(dtype.computed_in, old, index)
        inside = replace(made, known=list(made.known), asked=list(made.asked))
        inside.known += [on_grid(before, LIMIT, STEP, Trust.BITS)] * 4
        value = inside.make(dtype.computed_in, self.depth())
        update = Store(buffer, index, value.expr)
        if old is not buffer and before in nodes(update):
            self.shares.append((buffer, old))
        if dtype in HALVES and value.trust is Trust.NEAR:
            return [update]
        after = Known(Load(dtype.computed_in, buffer, index), value.trust)
        made.known.append(after)
        return [update, self.store(after, axes, dtype)] if self.choices.chance(2) else [update]

    def combine(
        self, made: Expressions, outer: tuple[Axis, ...], inner: tuple[Axis, ...], in_order: bool
    ) -> Store:
        """A store that combines; points of the stage may meet in one element."""
        dtype = self.choices.one_of(STORED if in_order else ARITHMETIC)
        value = made.make(dtype.computed_in, self.depth())
        if dtype in HALVES and value.trust is Trust.NEAR:
            value = made.load(dtype.computed_in)  # rounding every time would add up
        combine = self.kind(dtype)
        if dtype in HALVES and combine is Combine.PROD:
            combine = Combine.MAX
        expr, trust = self.combinable(made, value, combine, exact=in_order)
        is_computed = self.choices.chance(2)
        target = self.place(inner) if is_computed else loaded_index(self.choices, inner)
        index, length = combined_index(self.choices, outer, target)
        name = EXACT if trust >= Trust.VALUE else "near"
        return Store(Buffer(self.fresh(name), dtype, length), index, expr, combine)

    def place(self, inner: tuple[Axis, ...]) -> Range:
        """A computed place; outer iterations are not to meet, so they have no say in it."""
        return Expressions(self.choices, inner, self.fresh).place()


def _is_scratch(expr: Expr) -> bool:
    return isinstance(expr, Load) and expr.buffer.is_scratch
