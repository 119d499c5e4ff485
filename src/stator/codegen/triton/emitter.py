"""Values and indices as Triton text.

Every value is a block: of one dimension in a flat kernel, of two otherwise, with a length of 1
along dimensions that it does not depend on.  Triton spreads it where it meets another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from stator.codegen.triton.prims import TYPES, apply_text, convert_text, number_text
from stator.codegen.triton.shape import is_wide
from stator.core.dtypes import DType
from stator.loops.access import nodes
from stator.loops.build import const
from stator.loops.index import (
    Axis,
    Clamped,
    Element,
    Index,
    Quotient,
    Remainder,
    Symbol,
    is_at_least,
    lower_bound,
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
    Store,
    Within,
    children,
    index_parts,
    innermost_first,
    walk,
)
from stator.loops.prims import Prim
from stator.loops.values import product

QUARTER: Final = 4  # neighbours that share the words of Philox
BEYOND_CACHE: Final = 1 << 28  # bytes of a buffer that is gone from any cache when read again
ATOMICS: Final = {Combine.SUM: "add", Combine.MAX: "max", Combine.MIN: "min"}


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of the blocks."""

    name: str  # its counter's
    block: str  # how long it is
    mask: str | None  # where it is within its bounds; None: everywhere


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers that follow each other along a block, from a multiple of four on."""

    together: int  # those that a thread takes: 4 or 8
    quarters: str  # of the first of them


@dataclass(frozen=True, slots=True)
class Mask:
    """A condition, and the dimensions that it depends on."""

    text: str
    dims: frozenset[str]


@dataclass(frozen=True, slots=True)
class Known:
    """A value that was computed, and the conditions that it was read under."""

    name: str
    masks: tuple[Mask, ...]


@dataclass(slots=True)
class Scope:
    """What is known in a block of lines, by the fields of an emitter."""

    dims: tuple[Dim, ...]
    values: dict[Expr, tuple[Known, ...]]
    places: dict[Index, str]
    axes: dict[Axis, tuple[str, str | None]]
    runs: dict[Index, Run]
    conditions: dict[tuple[Index, Index], str]

    def copied(self) -> Scope:
        """The same, to add to."""
        known = dict(self.values), dict(self.places), dict(self.axes), dict(self.runs)
        return Scope(self.dims, *known, dict(self.conditions))


@dataclass(slots=True)
class Emitter:
    """State of the function that is being written, and text for values."""

    kernel: Kernel
    dims: tuple[Dim, ...]
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    count: int = 0
    axes: dict[Axis, tuple[str, str | None]] = field(default_factory=dict)  # name, dimension
    rows: dict[tuple[Axis, ...], Dim] = field(default_factory=dict)  # inner axes in one block
    accumulators: dict[str, str] = field(default_factory=dict)
    places: dict[Index, str] = field(default_factory=dict)  # computed already
    runs: dict[Index, Run] = field(default_factory=dict)  # counts along a block
    conditions: dict[tuple[Index, Index], str] = field(default_factory=dict)  # index, limit
    values: dict[Expr, tuple[Known, ...]] = field(default_factory=dict)
    reading: dict[Expr, bool] = field(default_factory=dict)  # whether it holds a load
    loaded: set[Buffer] = field(default_factory=set)
    together: int = QUARTER  # elements side by side that are one thread's: 4 or 8
    is_coarse: bool = False  # all that it reads and writes is of half precision
    chosen: tuple[Mask, ...] = ()  # conditions under which the present value is needed
    # What the threads moved since they last waited for each other: see order.py.
    read: set[Buffer] = field(default_factory=set)  # memory that another thread may store to
    stored: set[Buffer] = field(default_factory=set)
    own: frozenset[Load] = frozenset()  # loads of what the same thread alone will store over
    is_wide: bool = field(init=False)  # whether indices have 64 bits
    passing: frozenset[Buffer] = field(init=False)  # that go through the cache once

    def __post_init__(self) -> None:
        self.is_wide = is_wide(self.kernel)
        self.passing = _passing(self.kernel)

    # --- lines ---

    def line(self, text: str) -> None:
        """One more line."""
        self.lines.append("    " * self.depth + text)

    def let(self, text: str, hint: str = "v") -> str:
        """A value under a name of its own."""
        self.count += 1
        name = f"{hint}{self.count}"
        self.line(f"{name} = {text}")
        return name

    @contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """A block of lines; what it computes is not in scope behind it."""
        self.line(head)
        self.depth += 1
        with self.scope():
            yield
        self.depth -= 1

    @contextmanager
    def scope(self, again: Scope | None = None) -> Iterator[Scope]:
        """A scope of its own, or one that was left: what is known in it ends with it."""
        found = (self.values, self.places, self.axes, self.runs, self.conditions)
        outside = Scope(self.dims, *found)
        own = again or outside.copied()
        self._go_to(own)
        yield own
        own.dims = self.dims
        self._go_to(outside)

    def _go_to(self, scope: Scope) -> None:
        self.dims, self.values, self.places = scope.dims, scope.values, scope.places
        self.axes, self.runs, self.conditions = scope.axes, scope.runs, scope.conditions

    # --- indices ---

    def enter(self, axis: Axis, name: str, dim: str | None) -> None:
        """From here on the axis goes by this name."""
        self.axes[axis] = (name, dim)

    def decode(self, axes: Sequence[Axis], flat: str, dim: str | None) -> None:
        """Axes from a flat count, the last one fastest."""
        for axis in reversed(axes[1:]):
            size = self.index(axis.size)
            self.enter(axis, self.let(f"{flat} % {size}", "i"), dim)
            flat = self.let(f"{flat} // {size}", "i")
        if axes:
            self.enter(axes[0], flat, dim)

    def index(self, index: Index) -> str:
        """Text of an index; the same one is computed once."""
        if index.constant is not None:
            return str(index.constant)
        found = self.places.get(index)
        if found is None:
            found = self._sum(index)
            if len(index.terms) > 1 or not found.isidentifier():
                found = self.let(found, "p")
            if not self._holds_element(index):
                self.places[index] = found
        return found

    def _sum(self, index: Index) -> str:
        parts = []
        for atoms, factor in index.terms:
            factors = [self._atom(atom) for atom in atoms]
            if factor != 1 or not factors:
                factors.append(str(factor))
            parts.append("*".join(factors))
        return " + ".join(parts)

    def _atom(self, atom: object) -> str:
        match atom:
            case Axis():
                return self.axes[atom][0]
            case Symbol():
                return atom.name
            case Quotient() | Remainder():
                return self._divided(atom)
            case Clamped():
                value, low, high = map(self.index, (atom.value, atom.low, atom.high))
                return f"tl.maximum(tl.minimum({value}, {high}), {low})"
            case Element():
                return f"{self.value(atom.expr)}.to(tl.int64)"
            case _:
                raise AssertionError(f"no text for {atom}")

    def _divided(self, atom: Quotient | Remainder) -> str:
        value, by = self.index(atom.value), self.index(atom.by)
        low = lower_bound(atom.value)
        if low is not None and is_at_least(low, 0):
            return f"({value} {'//' if isinstance(atom, Quotient) else '%'} {by})"
        name = "floor_divided" if isinstance(atom, Quotient) else "floor_remainder"
        return f"{name}({value}, {by})"

    def _holds_element(self, index: Index) -> bool:
        """Whether it depends on what is loaded: that may differ from one condition to another."""
        return any(isinstance(atom, Element) for atom in index_parts(index))

    def dims_of(self, index: Index) -> frozenset[str]:
        """Dimensions that an index depends on."""
        found = (self.axes[axis][1] for axis in index.axes)
        return frozenset(dim for dim in found if dim is not None)

    # --- values ---

    def value(self, expr: Expr) -> str:
        """Text of an expression; the same one is computed once.

        What was read under fewer conditions is known under more; what reads nothing, under any.
        """
        for known in self.values.get(expr, ()):
            if all(mask in self.chosen for mask in known.masks):
                return known.name
        name = self._compute(expr)
        known = Known(name, self.chosen if self._reads(expr) else ())
        self.values[expr] = (*self.values.get(expr, ()), known)
        return name

    def _reads(self, expr: Expr) -> bool:
        """Whether there is a load in it."""
        for part in innermost_first(expr, self.reading.__contains__):
            inside = any(self.reading[child] for child in children(part))
            self.reading[part] = inside or isinstance(part, Load)
        return self.reading[expr]

    def _compute(self, expr: Expr) -> str:
        match expr:
            case Const():
                return self.constant(expr.value, expr.dtype)
            case Load():
                return self._load(expr)
            case Apply(prim=Prim.PHILOX_ONE) if shared := self._shared(expr):
                return shared
            case Apply():
                return self._apply(expr)
            case Cast():
                value = self.value(expr.value)
                return self.let(convert_text(value, expr.value.dtype, expr.dtype))
            case IndexValue():
                return self._number(expr)
            case Accumulated():
                return self.accumulators[expr.name]
            case Within():
                return self._choice(expr)
            case _:
                raise AssertionError(f"no text for {type(expr).__name__}")

    def _apply(self, expr: Apply) -> str:
        match expr:
            case Apply(prim=Prim.EQ, args=(IndexValue() as count, other)):
                return self._is_at(count, other)
            case Apply(prim=Prim.EQ, args=(other, IndexValue() as count)):
                return self._is_at(count, other)
        args = [self.value(arg) for arg in expr.args]
        dtype = expr.args[-1].dtype
        return self.let(apply_text(expr.prim, args, dtype, is_coarse=self.is_coarse))

    def _is_at(self, count: IndexValue, other: Expr) -> str:
        """Whether a count is a number: in 32 bits where it has no more, which cost half as much."""
        number = self.value(other)
        if count.dtype is not DType.I64 or self.is_wide or not count.index.axes:
            return self.let(f"({self.value(count)} == {number})")
        low = self.let(f"{number}.to(tl.int32)")
        fits = self.let(f"({low} == {number})")
        return self.let(f"({self.index(count.index)} == {low}) & {fits}")

    def _shared(self, draw: Apply) -> str | None:
        """A word for each number, of rounds done once for neighbours; None for other numbers."""
        number, above = draw.args[3:]
        if not isinstance(number, IndexValue):
            return None
        wide = IndexValue(DType.I32, number.index // (1 << 32))
        if above not in (const(0, DType.I32), wide):
            return None
        for count, run in self.runs.items():
            rest = number.index - count
            if any(factor % QUARTER for _, factor in rest.terms):
                continue
            first = (
                f"{self.index(rest // QUARTER)} + {run.quarters}" if rest.terms else run.quarters
            )
            given = ", ".join((*map(self.value, draw.args[:3]), first))
            name = "philox_eights" if run.together == 2 * QUARTER else "philox_fours"
            shape = self.shape(self.dims_of(number.index))
            return self.let(f"tl.reshape({name}({given}), {shape})")
        return None

    def constant(self, value: float, dtype: DType) -> str:
        """A number as a block of one element."""
        if value == 0 and str(value).startswith("-"):
            return f"({self.constant(0.0, dtype)} * -1.0)"  # of zeros Triton fills blocks with 0
        return f"tl.full({self.shape(())}, {number_text(value, dtype)}, {TYPES[dtype]})"

    def _number(self, expr: IndexValue) -> str:
        if expr.index.constant is not None:
            return self.constant(expr.index.constant, expr.dtype)
        place = self.index(expr.index)
        if expr.index.axes or self._holds_element(expr.index):
            return self.let(f"{place}.to({TYPES[expr.dtype]})")
        return self.let(f"({self.constant(0, DType.I64)} + {place}).to({TYPES[expr.dtype]})")

    def _choice(self, expr: Within) -> str:
        """Both sides, each loading only where it is chosen."""
        at, end = expr.index.constant, expr.limit.constant
        if at is not None and end is not None:  # decided: a Python truth is no mask
            return self.value(expr.inside if 0 <= at < end else expr.outside)
        within = self._within(expr)
        dims = self.dims_of(expr.index) | self.dims_of(expr.limit)
        before = self.chosen
        self.chosen = (*before, Mask(within, dims))
        inside = self.value(expr.inside)
        self.chosen = (*before, Mask(f"({within} == 0)", dims))
        outside = self.value(expr.outside)
        self.chosen = before
        return self.let(f"tl.where({within}, {inside}, {outside})")

    def _within(self, expr: Within) -> str:
        """The condition; the same one is asked once, unless it depends on what is loaded."""
        found = self.conditions.get((expr.index, expr.limit))
        if found is None:
            index, limit = self.index(expr.index), self.index(expr.limit)
            low = lower_bound(expr.index)
            # Not asked where it is known: it would be a Python number, which is no mask.
            above = "" if low is not None and is_at_least(low, 0) else f"({index} >= 0) & "
            found = self.let(f"{above}({limit} > {index})", "c")
            if not self._holds_element(expr.index) and not self._holds_element(expr.limit):
                self.conditions[expr.index, expr.limit] = found
        return found

    # --- memory ---

    def _load(self, expr: Load) -> str:
        self.loaded.add(expr.buffer)
        dims = self.dims_of(expr.index)
        if expr not in self.own:
            self.read.add(self.memory(expr.buffer))
        leaves = ', eviction_policy="evict_first"' if expr.buffer in self.passing else ""
        loaded = self.let(f"tl.load({self._where(expr.buffer, expr.index, dims)}{leaves})")
        return self._widened(loaded, expr.buffer.dtype)

    def _widened(self, value: str, dtype: DType) -> str:
        if dtype is DType.BOOL:
            return self.let(f"({value} != 0)")
        return value if dtype.computed_in is dtype else self.let(f"{value}.to(tl.float32)")

    def store(self, statement: Store, value: str) -> None:
        """Write a value, or combine it into what is there."""
        buffer = statement.buffer
        # Along the first dimension every store moves, or there is one iteration alone.
        dims = self.dims_of(statement.index) | {self.dims[0].name}
        place, *mask = self._where(buffer, statement.index, dims).split(", mask=")
        if buffer.dtype is DType.BOOL:
            value = f"{value}.to(tl.int8)"
        else:
            value = convert_text(value, statement.value.dtype, buffer.dtype)
        value = f"tl.broadcast_to({value}, {self.shape(dims)})"
        given = ", ".join((place, value, *(f"mask={text}" for text in mask)))
        if statement.combine is None:
            self.line(f"tl.store({given})")
        else:
            self.line(f'tl.atomic_{ATOMICS[statement.combine]}({given}, sem="relaxed")')
        self.stored.add(buffer)
        self.forget_loads(buffer)

    def memory(self, buffer: Buffer) -> Buffer:
        """The buffer that is stored to, if this one lies in the same memory."""
        return next((new for new, old in self.kernel.shares if old is buffer), buffer)

    def shape(self, dims: Collection[str]) -> str:
        """Of a block that depends on these dimensions."""
        return f"[{', '.join(d.block if d.name in dims else '1' for d in self.dims)}]"

    def accumulated(self, name: str, total: str) -> None:
        """From here on an accumulator holds this."""
        if name in self.accumulators:  # what a scan held at a point is not what it holds in the end
            self._forget(lambda part: isinstance(part, Accumulated) and part.name == name)
        self.accumulators[name] = total

    def forget_loads(self, buffer: Buffer) -> None:
        """What was read of the buffer may not be there any more."""
        if buffer in self.loaded:
            self._forget(lambda part: isinstance(part, Load) and part.buffer is buffer)

    def _forget(self, is_stale: Callable[[Expr], bool]) -> None:
        for expr in [expr for expr in self.values if any(map(is_stale, walk(expr)))]:
            del self.values[expr]

    def _where(self, buffer: Buffer, index: Index, dims: frozenset[str]) -> str:
        """Addresses along `dims`, and the mask if there is one."""
        buffer = self.memory(buffer)
        bounds = [Mask(d.mask, frozenset({d.name})) for d in self.dims if d.mask and d.name in dims]
        masks = [*bounds, *self.chosen]
        place, own = self.index(index), self.dims_of(index)
        wanted = dims.union(*(mask.dims for mask in masks))
        if wanted - own:
            if not own:
                place = f"{self.constant(0, DType.I32)} + {place}"
            place = f"tl.broadcast_to({place}, {self.shape(own | wanted)})"
        address = f"{buffer.name} + ({place})"
        return f"{address}, mask={' & '.join(m.text for m in masks)}" if masks else address


def _passing(kernel: Kernel) -> frozenset[Buffer]:
    """Large buffers that the kernel reads once, element by element, and does not write."""
    count: Counter[Buffer] = Counter()
    for stage in kernel.stages:
        points = product([axis.size for axis in (*kernel.outer, *stage.inner)]).constant
        for load in {n for s in stage.body for n in nodes(s) if isinstance(n, Load)}:
            length = load.buffer.size.constant or 0
            is_large = length * load.buffer.dtype.bytes >= BEYOND_CACHE
            count[load.buffer] += 1 if is_large and points and points <= length else 2
    written = frozenset(kernel.written)
    return frozenset(buffer for buffer, times in count.items() if times == 1) - written
