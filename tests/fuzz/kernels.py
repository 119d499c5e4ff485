"""Random kernels that verify, arguments for them, and how near two results have to be.

Where a result follows from IEEE 754 alone, it has to be equal; where a float sum may have been
reassociated or a function has some ulp of freedom, near.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from hypothesis import strategies as st

from stator.core.dtypes import DType
from stator.loops.access import buffers, header_sizes, indices, nodes, symbols
from stator.loops.build import apply, const
from stator.loops.index import Axis, Element, Index, Quotient, Remainder, Symbol
from stator.loops.interp import NUMPY, bf16_bits, bf16_value
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Buffer,
    Combine,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    loads_of,
)
from stator.loops.prims import Prim
from tests.fuzz.accesses import SIGNED, Draw, flat, stored_index
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

Array: TypeAlias = "np.ndarray[Any, Any]"

SIZES: Final = (2, 3, 1, 5, 7, 8, 16, 17, 31, 33)
EXACT: Final = "exact"  # names of buffers in which two right results are equal begin so
LONG: Final = (65, 100, 513, 1025, 1030)  # more than backends take in one block
SYMBOL_VALUES: Final = (3, 1, 2, 5, 8, 16, 17, 40, 0)
POINTS: Final = 400  # that a stage may have where no size is long: the interpreter is slow


@st.composite
def kernels(draw: Draw) -> Kernel:
    """A kernel of one to three outer axes and one to three stages that verifies."""
    return _Maker(draw).kernel()


@dataclass
class _Maker:
    draw: Draw
    count: int = 0  # of names given
    room: int = POINTS  # what the sizes still to be drawn may multiply to
    accumulated: list[Known] = field(default_factory=list)
    scratch: list[tuple[tuple[Axis, ...], Known]] = field(default_factory=list)  # of stages before

    def kernel(self) -> Kernel:
        outer = tuple(self.axis(f"i{n}") for n in range(self.draw(st.integers(1, 3))))
        room = self.room
        inner: tuple[Axis, ...] = ()
        stages: list[Stage] = []
        for _ in range(self.draw(st.integers(1, 3))):
            self.room = room
            if not stages or self.draw(st.integers(0, 2)) == 0:
                names = [f"i{len(outer) + n}" for n in range(self.draw(st.integers(0, 2)))]
                inner = tuple(self.axis(name) for name in names)
            stages.append(self.stage(outer, inner))
        return Kernel("fuzzed", outer, (*stages, *self.unread(outer, stages)))

    def unread(self, outer: tuple[Axis, ...], stages: list[Stage]) -> list[Stage]:
        """Stages that store what no stage has read, so that nothing is computed in vain."""
        read = {node for stage in stages for s in stage.body for node in nodes(s)}
        left = [((), known) for known in self.accumulated] + self.scratch
        return [
            Stage(inner, (self.store(known, (*outer, *inner), known.dtype),))
            for inner, known in left
            if known.expr not in read
        ]

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def axis(self, name: str) -> Axis:
        if self.draw(st.integers(0, 3)) == 3:
            symbol = Index.of(Symbol(f"s{self.draw(st.integers(0, 1))}"))
            self.room //= 6
            return Axis(name, self.draw(st.sampled_from((symbol, symbol, 2 * symbol, symbol + 3))))
        choices = [size for size in SIZES if size <= self.room] or [1]
        if self.room == POINTS and self.draw(st.integers(0, 19)) == 19:
            choices = list(LONG)
        size = self.draw(st.sampled_from(choices))
        self.room //= min(size, POINTS)
        return Axis(name, Index.of(size))

    def expressions(self, axes: Sequence[Axis], inner: tuple[Axis, ...] = ()) -> Expressions:
        """A maker of expressions that sees what earlier stages left."""
        left = [known for own, known in self.scratch if own == inner]
        return Expressions(self.draw, axes, self.fresh, [*self.accumulated, *left])

    def stage(self, outer: tuple[Axis, ...], inner: tuple[Axis, ...]) -> Stage:
        axes = (*outer, *inner)
        made = self.expressions(axes, inner)
        body: list[Statement] = []
        accumulated: list[Known] = []
        for _ in range(self.draw(st.integers(1, 3))):
            kind = self.draw(st.integers(0, 4))
            if kind <= 1 and inner:
                statement, known = self.accumulate(made)
                body.append(statement)
                accumulated.append(known)
            elif kind == 2 and all(axis.size.constant for axis in inner):
                body.append(self.keep(made, inner))
            elif kind == 3:
                body.append(self.update(made, axes))
            else:
                dtype = self.draw(st.sampled_from((*ARITHMETIC, *HALVES, *HALVES)))
                body.append(self.store(made.make(dtype.computed_in, 3), axes, dtype))
        self.accumulated += accumulated
        return Stage(inner, tuple(body))

    # --- statements ---

    def accumulate(self, made: Expressions) -> tuple[Accumulate, Known]:
        name = self.fresh("acc")
        value = made.make(self.draw(st.sampled_from(ARITHMETIC)), 2)
        dtype, trust = value.dtype, value.trust
        if dtype is DType.BOOL:
            kinds = (Combine.ANY, Combine.ALL, Combine.MAX, Combine.MIN)
        else:
            kinds = (Combine.SUM, Combine.MAX, Combine.MIN, Combine.PROD)
        combine = self.draw(st.sampled_from(kinds))
        expr = value.expr
        if dtype.is_float and combine is Combine.SUM:
            if not value.sums_exactly(13 if dtype is DType.F32 else 40):
                expr, trust = apply(Prim.ABS, expr), Trust.NEAR  # nothing cancels
        elif dtype.is_float and combine is Combine.PROD:
            near_one = made.grid(dtype, 2).expr  # so that no order overflows
            expr, trust = apply(Prim.FMA, near_one, 1 / 1024, const(1.0, dtype)), Trust.NEAR
        known = Known(Accumulated(dtype, name), min(trust, Trust.VALUE))
        return Accumulate(name, combine, expr), known

    def keep(self, made: Expressions, inner: tuple[Axis, ...]) -> Store:
        """A store to scratch; the stages that follow may load it."""
        value = made.make(self.draw(st.sampled_from(ARITHMETIC)), 2)
        dtype = value.dtype
        if dtype is DType.F32 and value.trust >= Trust.VALUE:
            dtype = self.draw(st.sampled_from((DType.F32, *HALVES)))
        index, length = flat([(Index.of(axis), axis.size) for axis in inner])
        buffer = Buffer(self.fresh("kept"), dtype, length, is_scratch=True)
        last = len(self.scratch)
        self.scratch.append((inner, Known(Load(value.dtype, buffer, index), value.trust)))
        made.known.append(self.scratch[last][1])
        if inner and self.draw(st.booleans()):
            backwards = buffer.size - 1 - index
            known = Known(Load(value.dtype, buffer, backwards), value.trust)
            self.scratch[last] = (inner, known)  # for later stages: in this one it is not there yet
        return Store(buffer, index, value.expr)

    def store(self, value: Known, axes: Sequence[Axis], dtype: DType) -> Store:
        index, length = stored_index(self.draw, axes)
        name = EXACT if value.trust >= Trust.VALUE else "near"
        return Store(Buffer(self.fresh(name), dtype, length), index, value.expr)

    def update(self, made: Expressions, axes: Sequence[Axis]) -> Store:
        """A store to what the same statement loads."""
        dtype = self.draw(st.sampled_from((*ARITHMETIC, *HALVES, *HALVES)))
        index, length = stored_index(self.draw, axes)
        buffer = Buffer(self.fresh("own"), dtype, length)
        before = Load(dtype.computed_in, buffer, index)
        inside = Expressions(self.draw, axes, self.fresh, list(made.known))
        inside.known += [on_grid(before, LIMIT, STEP, Trust.BITS)] * 4
        return Store(buffer, index, inside.make(dtype.computed_in, 2).expr)


# --- arguments ---


def inputs(kernel: Kernel, seed: int) -> tuple[dict[str, Array], dict[str, int]]:
    """Arrays by buffer name and numbers by symbol name.

    Floats are small multiples of a power of two; some arrays hold NaN and infinities as well, or
    the extreme integers.
    """
    random = np.random.default_rng(seed)
    sizes = _sizes(kernel, random)
    rows = _row_counts(kernel, sizes)
    arrays = {}
    for buffer in buffers(kernel):
        if buffer.is_scratch:
            continue
        length = max(evaluate(buffer.size, sizes), 0)
        if buffer.name in rows:
            least = -rows[buffer.name] if buffer.name.startswith(SIGNED) else 0
            arrays[buffer.name] = random.integers(least, rows[buffer.name], length)
        else:
            arrays[buffer.name] = _array(buffer.dtype, length, random)
    return arrays, sizes


def evaluate(index: Index, sizes: Mapping[str, int]) -> int:
    """The number that a size is."""
    total = 0
    for product, factor in index.terms:
        for atom in product:
            match atom:
                case Symbol():
                    factor *= sizes[atom.name]
                case Quotient():
                    factor *= evaluate(atom.value, sizes) // evaluate(atom.by, sizes)
                case Remainder():
                    factor *= evaluate(atom.value, sizes) % evaluate(atom.by, sizes)
                case _:
                    raise AssertionError(f"{atom} is in a size")
        total += factor
    return total


def points(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """How many times the kernel's stages iterate, in all."""
    outer = int(np.prod([evaluate(axis.size, sizes) for axis in kernel.outer]))
    return outer * sum(
        int(np.prod([evaluate(axis.size, sizes) for axis in stage.inner]))
        for stage in kernel.stages
    )


def _sizes(kernel: Kernel, random: np.random.Generator) -> dict[str, int]:
    used = [*header_sizes(kernel), *(i for s in kernel.statements for i in indices(s))]
    names = sorted({symbol.name for index in used for symbol in symbols(index)})
    has_gather = any(_row_loads(kernel))
    choices = [value for value in SYMBOL_VALUES if value or not has_gather]
    sizes = {name: int(random.choice(choices)) for name in names}
    while points(kernel, sizes) > 2 * POINTS and max(sizes.values(), default=0) > 1:
        largest = max(sizes, key=lambda name: sizes[name])
        sizes[largest] //= 2
    return sizes


def _row_loads(kernel: Kernel) -> list[tuple[Load, Element, Index]]:
    """Loads that gather, what names their row, and the length of a row."""
    found = []
    for statement in kernel.statements:
        for load in (node for node in nodes(statement) if isinstance(node, Load)):
            for product, factor in load.index.terms:
                for position, atom in enumerate(product):
                    if isinstance(atom, Element):
                        rest = product[:position] + product[position + 1 :]
                        found.append((load, atom, Index(((rest, factor),))))
    return found


def _row_counts(kernel: Kernel, sizes: Mapping[str, int]) -> dict[str, int]:
    """For each buffer that names rows, how many there are."""
    counts: dict[str, int] = {}
    for load, element, _ in _row_loads(kernel):
        # The row's length is a sum, so the load has a term for each of its parts.
        length = sum(
            evaluate(part, sizes)
            for other, own, part in _row_loads(kernel)
            if other is load and own is element
        )
        for named in loads_of(element.expr):
            counts[named.buffer.name] = evaluate(load.buffer.size, sizes) // max(length, 1)
    return {name: max(count, 1) for name, count in counts.items()}


def _array(dtype: DType, length: int, random: np.random.Generator) -> Array:
    if dtype is DType.BOOL:
        return random.integers(0, 2, length).astype(np.bool_)
    has_special = random.integers(0, 4) == 0
    where = random.integers(0, 12, length) == 0
    if not dtype.is_float:
        limits = np.iinfo(NUMPY[dtype])
        small = random.integers(-9 if limits.min < 0 else 0, 10, length)
        extreme = random.choice([limits.min, limits.max], length)
        return np.where(has_special & where, extreme, small).astype(NUMPY[dtype])
    steps = int(LIMIT / STEP)
    plain = random.integers(-steps, steps + 1, length) * STEP
    special = random.choice([np.nan, np.inf, -np.inf, -0.0, -0.0], length)
    values = np.where(has_special & where, special, plain)
    if dtype is DType.BF16:
        return np.array([bf16_bits(float(value)) for value in values], np.uint16)
    return values.astype(NUMPY[dtype])


# --- comparison ---

_RELATIVE: Final = {DType.F64: 1e-12, DType.F32: 3e-5, DType.F16: 2**-9, DType.BF16: 2**-7}
_ABSOLUTE: Final = {DType.F64: 1e-280, DType.F32: 1e-30, DType.F16: 2**-23, DType.BF16: 1e-30}


def difference(
    kernel: Kernel, actual: Mapping[str, Array], expected: Mapping[str, Array]
) -> str | None:
    """Where two results of a kernel differ by more than they may; None if nowhere."""
    for buffer in kernel.written:
        got, want = actual[buffer.name], expected[buffer.name]
        for place in np.flatnonzero(~_agree(kernel, buffer, got, want)):
            return f"{buffer.name}[{place}] is {got[place]!r}, not {want[place]!r}"
    return None


def _agree(kernel: Kernel, buffer: Buffer, got: Array, want: Array) -> Array:
    dtype = buffer.dtype
    if not dtype.is_float:
        return np.asarray(got == want)
    if dtype is DType.BF16:
        got, want = (np.array([bf16_value(bits) for bits in x], np.float32) for x in (got, want))
    if buffer.name.startswith(EXACT):
        return np.asarray((got == want) | (np.isnan(got) & np.isnan(want)))
    computed = {node.dtype for statement in kernel.statements for node in nodes(statement)}
    # An f64 may have been computed from an f32.
    precision = DType.F32 if dtype is DType.F64 and DType.F32 in computed else dtype
    return np.isclose(
        got.astype(np.float64),
        want.astype(np.float64),
        rtol=_RELATIVE[precision],
        atol=_ABSOLUTE[dtype],
        equal_nan=True,
    )
