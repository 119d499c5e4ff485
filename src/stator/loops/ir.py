"""Loop IR: every node class, with its meaning.

A kernel runs its outer iterations in any order, in parallel.  Within one iteration its stages run
one after the other; a stage is a loop nest over its inner axes, whose iterations run in any order.
Each iteration runs the statements of the stage in order.  A store writes one element; an
accumulation combines a value into an accumulator, which later stages of the same outer iteration
read.  Scratch buffers live for one outer iteration.

A store may combine its value with what the element holds; then the points of its stage run one
after the other, and outer iterations touch different elements.  A stage that runs in order visits
its points one after the other, and its statements may read an accumulator that it makes itself:
they see what was accumulated so far.

Loads must be in bounds.  Integer arithmetic wraps; floats follow IEEE 754; sums may be
reassociated.  Half-precision elements exist in memory alone: they are loaded as f32 and rounded
when stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Final, TypeAlias

from stator.core.dtypes import DType
from stator.core.interning import Interned
from stator.loops.index import (
    REMEMBERED,
    Atom,
    Axis,
    Clamped,
    Element,
    Index,
    Leaf,
    Quotient,
    Remainder,
    is_at_least,
    lower_bound,
    upper_bound,
)
from stator.loops.prims import COMPARISONS, ROUNDINGS, Prim

LONGEST_TEXT: Final = 1_000  # characters of an expression


@dataclass(frozen=True, eq=False)
class Buffer(metaclass=Interned):
    """Memory of one type.  Text form: `buf0: f32[64*s0]`."""

    name: str
    dtype: DType
    size: Index  # elements
    is_scratch: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Expr(metaclass=Interned):
    """A scalar value; `dtype` is the type it is computed in."""

    dtype: DType

    @property
    def operands(self) -> tuple[Expr, ...]:
        """Expressions it is made of."""
        return ()

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        """By which indices are ordered that hold it.  Of a long text its digest.

        A part is written once for every path to it: there may be more of them than memory holds.
        """
        self._compute_inside_out("_text")
        text = self._written()
        return text if len(text) <= LONGEST_TEXT else f"#{sha256(text.encode()).hexdigest()[:16]}"

    def _written(self) -> str:
        """The text form, of those of its parts."""
        raise NotImplementedError

    def _compute_inside_out(self, name: str) -> None:
        """Compute a property of all that is inside, one part after the other: it may be deep."""
        for part in innermost_first(self, lambda part: name in part.__dict__):
            if part is not self:
                getattr(part, name)

    @cached_property
    def leaves(self) -> frozenset[Leaf]:
        """Axes and symbols it depends on."""
        self._compute_inside_out("leaves")
        return self._leaves()

    def _leaves(self) -> frozenset[Leaf]:
        return frozenset().union(*(operand.leaves for operand in self.operands))

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Axes it depends on."""
        return frozenset(leaf for leaf in self.leaves if isinstance(leaf, Axis))

    @cached_property
    def depth(self) -> int:
        """How many expressions stand inside of each other, at most."""
        self._compute_inside_out("depth")
        return 1 + max((part.depth for part in children(self)), default=0)

    @cached_property
    def size(self) -> int:
        """How many operations computing it takes."""
        return sum(operand.size for operand in self.operands)

    def replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr] | None = None) -> Expr:
        """The expression with axes or symbols replaced; `done`: what became of parts so far.

        Each part once: it may stand in as many places as there are paths to it.
        """
        done = {} if done is None else done
        for part in innermost_first(self, done.__contains__):
            is_free = part.leaves.isdisjoint(values)
            done[part] = part if is_free else part._replaced(values, done)
        return done[self]

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        """The same, where it depends on some of them and its parts are done."""
        return self


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A number.  Text form: `2.5`."""

    value: int | float | bool

    def _written(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """Read one element, widened to `dtype`.  Text form: `buf0[64*i0 + i1]`."""

    buffer: Buffer
    index: Index

    def _leaves(self) -> frozenset[Leaf]:
        return self.index.leaves

    @cached_property
    def size(self) -> int:
        return 1

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        return Load(self.dtype, self.buffer, self.index.replaced(values, done))

    def _written(self) -> str:
        return f"{self.buffer}[{self.index}]"


@dataclass(frozen=True, eq=False)
class IndexValue(Expr):
    """An index as a number.  Text form: `value(i0)`."""

    index: Index

    def _leaves(self) -> frozenset[Leaf]:
        return self.index.leaves

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        return IndexValue(self.dtype, self.index.replaced(values, done))

    def _written(self) -> str:
        return f"value({self.index})"


@dataclass(frozen=True, eq=False)
class Accumulated(Expr):
    """What an earlier stage accumulated in this outer iteration.  Text form: `acc0`."""

    name: str

    def _written(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    """Conversion; float to integer truncates, to bool is `!= 0`.  Text form: `f32(x)`."""

    value: Expr

    @property
    def operands(self) -> tuple[Expr, ...]:
        return (self.value,)

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        return Cast(self.dtype, done[self.value])

    def _written(self) -> str:
        return f"{self.dtype!r}({self.value})"


@dataclass(frozen=True, eq=False)
class Apply(Expr):
    """A primitive on arguments.  Text form: `add(x, y)`."""

    prim: Prim
    args: tuple[Expr, ...]

    @property
    def operands(self) -> tuple[Expr, ...]:
        return self.args

    @cached_property
    def size(self) -> int:
        own = self.prim not in ROUNDINGS  # a load or a store rounds as well
        return own + sum(arg.size for arg in self.args)

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        return Apply(self.dtype, self.prim, tuple(done[arg] for arg in self.args))

    def _written(self) -> str:
        return f"{self.prim.name.lower()}({', '.join(str(arg) for arg in self.args)})"


@dataclass(frozen=True, eq=False)
class Within(Expr):
    """`inside` where 0 <= index < limit, else `outside`; only that one is computed.

    Text form: `within(i0 - 3, 5, x, y)`.
    """

    index: Index
    limit: Index
    inside: Expr
    outside: Expr

    @property
    def operands(self) -> tuple[Expr, ...]:
        return (self.inside, self.outside)

    def _leaves(self) -> frozenset[Leaf]:
        sides = self.inside.leaves | self.outside.leaves
        return self.index.leaves | self.limit.leaves | sides

    @cached_property
    def size(self) -> int:
        return 1 + self.inside.size + self.outside.size

    def _replaced(self, values: Mapping[Leaf, Index], done: dict[Expr, Expr]) -> Expr:
        index, limit = self.index.replaced(values, done), self.limit.replaced(values, done)
        return within(index, limit, done[self.inside], done[self.outside])

    def _written(self) -> str:
        return f"within({self.index}, {self.limit}, {self.inside}, {self.outside})"


def within(index: Index, limit: Index, inside: Expr, outside: Expr) -> Expr:
    """The choice, made here where the bounds of `index` settle it."""
    if inside is outside:
        return inside
    low, high = lower_bound(index), upper_bound(index)
    if low is not None and high is not None:
        if is_at_least(low, 0) and is_at_least(limit - high, 1):
            return inside
        if is_at_least(-high, 1) or is_at_least(low - limit, 0):
            return outside
    return Within(inside.dtype, index, limit, inside, outside)


class Combine(Enum):
    """How an accumulator takes a value in; starts from the neutral one."""

    __hash__ = object.__hash__  # a member is one object: Enum's own is a call in Python

    SUM = "sum"
    PROD = "prod"
    MAX = "max"  # NaN wins
    MIN = "min"  # NaN wins
    ANY = "any"
    ALL = "all"


@dataclass(frozen=True, eq=False)
class Store(metaclass=Interned):
    """Write one element, rounded to the buffer's type, or combine a value into it.

    Text form: `buf0[i0] = x`, `buf0[i0] sum= x`.
    """

    buffer: Buffer
    index: Index
    value: Expr
    combine: Combine | None = None

    def __str__(self) -> str:
        how = "=" if self.combine is None else f"{self.combine.value}="
        return f"{self.buffer}[{self.index}] {how} {self.value}"


@dataclass(frozen=True, eq=False)
class Accumulate(metaclass=Interned):
    """Combine a value into an accumulator.  Text form: `acc0 sum= x`."""

    name: str
    combine: Combine
    value: Expr

    def __str__(self) -> str:
        return f"{self.name} {self.combine.value}= {self.value}"


Statement: TypeAlias = Store | Accumulate


@dataclass(frozen=True, eq=False)
class Stage(metaclass=Interned):
    """A loop nest: statements for each point of the inner axes.  Text form: `stage i1: 64`.

    In order (`scan i1: 64`), the last axis is the fastest.
    """

    inner: tuple[Axis, ...]
    body: tuple[Statement, ...]
    in_order: bool = False


@dataclass(frozen=True, eq=False)
class Kernel(metaclass=Interned):
    """Outer iterations, each running the stages in order.

    `shares` are pairs of a buffer that is stored to and one that is read and lies in the same
    memory: the loads of a point see what was there before its stores.  Text form: `shares new: x`.
    A kernel over a list runs once for each set of buffers and sizes that it is given.  Text form:
    `list`.
    """

    name: str
    outer: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    shares: tuple[tuple[Buffer, Buffer], ...] = ()
    is_list: bool = False

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, in order."""
        return tuple(statement for stage in self.stages for statement in stage.body)

    @cached_property
    def written(self) -> tuple[Buffer, ...]:
        """Buffers that it stores to, scratch left out, in order."""
        found = [s.buffer for s in self.statements if isinstance(s, Store)]
        return tuple(dict.fromkeys(b for b in found if not b.is_scratch))

    @cached_property
    def read(self) -> tuple[Buffer, ...]:
        """Buffers that it loads from and does not write, in order."""
        found = [load.buffer for s in self.statements for load in loads_of(s.value)]
        for statement in self.statements:
            if isinstance(statement, Store):
                found += [load.buffer for load in _index_loads(statement.index)]
        written = {*self.written, *(read for _, read in self.shares)}
        return tuple(dict.fromkeys(b for b in found if not b.is_scratch and b not in written))

    @cached_property
    def scratch(self) -> tuple[Buffer, ...]:
        """Buffers that live for one outer iteration."""
        found = [s.buffer for s in self.statements if isinstance(s, Store)]
        return tuple(dict.fromkeys(b for b in found if b.is_scratch))


def children(expr: Expr) -> tuple[Expr, ...]:
    """Expressions directly inside of `expr`, those of its index included."""
    if isinstance(expr, Load | IndexValue):
        return expressions_in(expr.index)
    if isinstance(expr, Within):
        return (*expressions_in(expr.index), *expressions_in(expr.limit), *expr.operands)
    return expr.operands


def innermost_first(expr: Expr, is_done: Callable[[Expr], bool]) -> Iterator[Expr]:
    """The expression and all inside of it, each part once, behind those that it is made of.

    Parts that are done, and what is inside of them, are left out: so whoever remembers what he was
    given, part by part, walks no path twice, and walks no deeper than one.
    """
    seen: set[Expr] = set()
    stack = [(expr, False)]
    while stack:
        current, is_last = stack.pop()
        if is_last:
            yield current
        elif current not in seen and not is_done(current):
            seen.add(current)
            stack.append((current, True))
            stack += [(child, False) for child in reversed(children(current))]


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and all inside of it, indices of loads included; shared parts once."""
    seen: set[Expr] = set()
    stack = [expr]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        stack += current.operands
        if isinstance(current, Load | IndexValue | Within):
            stack += expressions_in(current.index)


def loads_of(expr: Expr) -> list[Load]:
    """Every load inside of `expr`, once."""
    return [node for node in walk(expr) if isinstance(node, Load)]


def _index_loads(index: Index) -> list[Load]:
    return [load for expr in expressions_in(index) for load in loads_of(expr)]


def index_parts(index: Index) -> Iterator[Atom]:
    """Atoms of an index, those inside of quotients included."""
    for product, _ in index.terms:
        for atom in product:
            yield atom
            if isinstance(atom, Quotient | Remainder):
                yield from index_parts(atom.value)
                yield from index_parts(atom.by)
            elif isinstance(atom, Clamped):
                for part in (atom.value, atom.low, atom.high):
                    yield from index_parts(part)


@lru_cache(REMEMBERED)
def expressions_in(index: Index) -> tuple[Expr, ...]:
    """Expressions that an index holds directly."""
    return tuple(atom.expr for atom in index_parts(index) if isinstance(atom, Element))


def result_dtype(prim: Prim, args: tuple[Expr, ...]) -> DType:
    """Type of a primitive's result."""
    if prim in COMPARISONS:
        return DType.BOOL
    return args[-1].dtype
