"""What must hold of a kernel: types, definition before use, bounds, no races.

Where a claim cannot be decided (symbolic sizes, quotients, gathers), the kernel passes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NoReturn

from stator.core.dtypes import DType
from stator.errors import VerifyError
from stator.loops.access import buffers, indices, nodes, symbols
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
    upper_bound,
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
    Statement,
    Store,
    Within,
    children,
    index_parts,
    result_dtype,
)
from stator.loops.prims import COMPARISONS, RANDOM, Prim
from stator.loops.same_row import stays_in_row
from stator.loops.text import statement_text

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
SIZE_ATOMS: Final = (Symbol, Quotient, Remainder, Clamped)


def verify(kernel: Kernel) -> None:
    """Raise VerifyError if the kernel breaks an invariant of the loop IR."""
    _Verifier(kernel).run()


# --- what primitives take ---


def _is_integer(dtype: DType) -> bool:
    return not dtype.is_float and dtype is not DType.BOOL


def _is_number(dtype: DType) -> bool:
    return dtype is not DType.BOOL


def _is_bool_or_integer(dtype: DType) -> bool:
    return not dtype.is_float


def _is_float(dtype: DType) -> bool:
    return dtype.is_float


def _is_any(dtype: DType) -> bool:
    return True


Takes = Callable[[DType], bool]
_NUMBERS: Final = (Prim.ADD, Prim.SUB, Prim.MUL, Prim.NEG, Prim.ABS, Prim.DIV, Prim.MOD)
_LOGIC: Final = (Prim.AND, Prim.OR, Prim.XOR, Prim.NOT)
_CHOICE: Final = (Prim.MIN, Prim.MAX, Prim.WHERE)
# Every other primitive takes floats.
_TAKES: Final[dict[Prim, Takes]] = {
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_LOGIC, _is_bool_or_integer),
    **dict.fromkeys((Prim.SHL, Prim.SHR), _is_integer),
    **dict.fromkeys((*_CHOICE, *COMPARISONS), _is_any),
    **dict.fromkeys((Prim.TO_F16, Prim.TO_BF16), lambda dtype: dtype is DType.F32),
    **dict.fromkeys(RANDOM, lambda dtype: dtype is DType.I32),
}
_BINARY: Final = frozenset(
    {Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.MOD, Prim.MIN, Prim.MAX}
    | (COMPARISONS - {Prim.IS_NAN})
    | {Prim.AND, Prim.OR, Prim.XOR, Prim.SHL, Prim.SHR}
    | {Prim.COPYSIGN, Prim.ATAN2, Prim.POW, Prim.HYPOT}
)
_TERNARY: Final = frozenset({Prim.WHERE, Prim.FMA})
_COMBINES: Final[dict[Combine, Takes]] = {
    Combine.SUM: _is_number,
    Combine.PROD: _is_number,
    Combine.MAX: _is_any,
    Combine.MIN: _is_any,
    Combine.ANY: lambda dtype: dtype is DType.BOOL,
    Combine.ALL: lambda dtype: dtype is DType.BOOL,
}


def argument_count(prim: Prim) -> int:
    """How many arguments a primitive takes."""
    if prim in RANDOM:
        return 5 if prim is Prim.PHILOX_ONE else 4
    return 3 if prim in _TERNARY else 2 if prim in _BINARY else 1


@dataclass
class _Verifier:
    kernel: Kernel
    accumulated: dict[str, DType] = field(default_factory=dict)  # in earlier stages
    stored: dict[Buffer, list[Index]] = field(default_factory=dict)  # in this stage, so far
    stored_before: set[Buffer] = field(default_factory=set)  # in earlier stages
    scope: frozenset[Axis] = frozenset()
    guarded: set[Expr] = field(default_factory=set)  # of this statement: computed by choice
    at: Statement | None = None

    def fail(self, what: str) -> NoReturn:
        where = self.kernel.name
        if self.at is not None:
            where += ": " + statement_text(self.kernel, self.at)
        raise VerifyError("verify loops", what, where=where)

    def need(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def run(self) -> None:
        self.check_names()
        self.check_sizes()
        self.check_shared_stores()
        for stage in self.kernel.stages:
            self.check_stage(stage)

    # --- header ---

    def check_names(self) -> None:
        """One name stands for one thing, as far as the text form needs it."""
        kernel, used = self.kernel, buffers(self.kernel)
        for stage in kernel.stages:
            axes = [axis.name for axis in (*kernel.outer, *stage.inner)]
            self.need_distinct(axes, "axis {} hides another one")
        sums = [s.name for s in kernel.statements if isinstance(s, Accumulate)]
        self.need_distinct([buffer.name for buffer in used], "two buffers have the name {}")
        self.need_distinct(sums, "accumulator {} is accumulated twice")
        self.need_distinct([*sums, *(b.name for b in used)], "{} is a buffer and an accumulator")
        axes = list(dict.fromkeys(axis.name for axis in self.axes()))
        sizes = [axis.size for axis in self.axes()] + [buffer.size for buffer in used]
        inside = [index for s in kernel.statements for index in indices(s)]
        names = {symbol.name for index in (*sizes, *inside) for symbol in symbols(index)}
        self.need_distinct([*axes, *names], "{} is an axis and a symbol")
        for name in (kernel.name, *axes, *names, *sums, *(buffer.name for buffer in used)):
            self.need(_NAME.fullmatch(name) is not None, f"{name!r} is no name")

    def need_distinct(self, names: list[str], what: str) -> None:
        for name, count in Counter(names).items():
            self.need(count == 1, what.format(name))

    def axes(self) -> list[Axis]:
        inner = [axis for stage in self.kernel.stages for axis in stage.inner]
        return [*self.kernel.outer, *inner]

    def check_sizes(self) -> None:
        sizes = {axis.name: axis.size for axis in self.axes()}
        sizes |= {buffer.name: buffer.size for buffer in buffers(self.kernel)}
        for name, size in sizes.items():
            parts = index_parts(size)
            is_size = all(isinstance(part, SIZE_ATOMS) for part in parts)
            self.need(is_size, f"the size of {name} is more than numbers and symbols")
            self.need(not is_at_least(-size, 1), f"the size of {name} is negative")

    # --- statements ---

    def check_stage(self, stage: Stage) -> None:
        self.scope = frozenset((*self.kernel.outer, *stage.inner))
        self.stored = {}
        for statement in stage.body:
            self.at = statement
            self.guarded = _guarded(statement)
            for node in nodes(statement):
                self.check_node(node)
                if isinstance(node, Load) and node not in self.guarded:
                    self.check_bounds(node.buffer, node.index)
            if isinstance(statement, Store):
                self.check_store(statement, stage)
            else:
                self.check_accumulation(statement)
                if stage.in_order:
                    self.accumulated[statement.name] = statement.value.dtype
        self.at = None
        self.stored_before |= self.stored.keys()
        for statement in stage.body:
            if isinstance(statement, Accumulate):
                self.accumulated[statement.name] = statement.value.dtype

    def check_store(self, statement: Store, stage: Stage) -> None:
        buffer, index = statement.buffer, statement.index
        self.check_index(index)
        self.check_bounds(buffer, index)
        self.need_type(statement.value, buffer.dtype.computed_in, f"a store to {buffer.name}")
        if statement.combine is not None:
            is_taken = _COMBINES[statement.combine](statement.value.dtype)
            self.need(is_taken, f"{statement.combine.value} does not combine {buffer.dtype!r}")
            self.need(not buffer.is_scratch, f"scratch {buffer.name} is combined into")
            self.need_apart(index)
        elif not any(isinstance(atom, Element) for atom in index_parts(index)):
            outer = () if buffer.is_scratch else self.kernel.outer
            for axis in (*outer, *stage.inner):
                is_met = axis in index.axes or axis.size.constant in (0, 1)
                self.need(is_met, f"all iterations of {axis.name} store to the same element")
        self.stored.setdefault(buffer, []).append(index)

    def need_apart(self, index: Index) -> None:
        """Outer iterations run at the same time: what they combine into must differ."""
        for axis in self.kernel.outer:
            # A place that is computed from the axis as well cannot be decided.
            is_met = axis.size.constant in (0, 1) or any(axis in p for p, _ in index.terms)
            self.need(is_met, f"iterations of {axis.name} may combine into the same element")

    def check_accumulation(self, statement: Accumulate) -> None:
        dtype = statement.value.dtype
        is_taken = _COMBINES[statement.combine](dtype)
        self.need(is_taken, f"{statement.combine.value} does not combine {dtype!r}")

    def need_type(self, expr: Expr, dtype: DType, what: str) -> None:
        self.need(expr.dtype is dtype, f"{what} needs {dtype!r}, not {expr.dtype!r}")

    # --- expressions ---

    def check_node(self, node: Expr) -> None:
        is_half = node.dtype.computed_in is not node.dtype
        self.need(not is_half, f"{node.dtype!r} is computed in; it exists in memory alone")
        match node:
            case Const():
                self.check_constant(node)
            case Load():
                self.check_index(node.index)
                self.check_load(node)
            case IndexValue():
                self.check_index(node.index)
                self.need(node.dtype is not DType.BOOL, "an index is no bool")
            case Accumulated():
                self.need(
                    node.name in self.accumulated, f"no earlier stage accumulates {node.name}"
                )
                self.need_type(node, self.accumulated[node.name], f"accumulator {node.name}")
            case Apply():
                self.check_primitive(node)
            case Within():
                self.check_index(node.index)
                self.check_index(node.limit)
                self.need_type(node.inside, node.dtype, "the inside of within")
                self.need_type(node.outside, node.dtype, "the outside of within")
            case Cast():
                pass  # every type converts to every other
            case _:
                self.fail(f"{type(node).__name__} is no expression of the loop IR")

    def check_constant(self, node: Const) -> None:
        dtype, value = node.dtype, node.value
        kind = float if dtype.is_float else bool if dtype is DType.BOOL else int
        self.need(type(value) is kind, f"{value!r} is no constant of {dtype!r}")
        if _is_integer(dtype):
            bits = 8 * dtype.bytes - dtype.is_signed
            least = -(1 << bits) if dtype.is_signed else 0
            self.need(least <= value < 1 << bits, f"{value} does not fit {dtype!r}")

    def check_load(self, load: Load) -> None:
        buffer = load.buffer
        self.need_type(load, buffer.dtype.computed_in, f"a load of {buffer.name}")
        if buffer.is_scratch:
            # Iterations of one stage run in any order: only its own element is there already.
            is_stored = buffer in self.stored_before or load.index in self.stored.get(buffer, ())
            self.need(is_stored, f"scratch {buffer.name} is loaded before it is stored")
        elif buffer in self.kernel.written:
            # Outer iterations run in any order: another one's element may be old or new.
            places = [
                s.index
                for s in self.kernel.statements
                if isinstance(s, Store) and s.buffer is buffer
            ]
            is_own = load.index in places or (
                buffer in self.stored_before and any(self.is_in_row(load, p) for p in places)
            )
            self.need(is_own, f"{buffer.name} is stored to at another index")

    def is_in_row(self, load: Load, place: Index) -> bool:
        """Whether an element lies among those that the same outer iteration stored before."""
        if load in self.guarded and stays_in_row(self.kernel.outer, place, [load.index]):
            return True  # where it is read, it was stored
        row = _outer_part(load.index, self.kernel.outer)
        if row is not _outer_part(place, self.kernel.outer):
            return False
        inside, stored = load.index - row, place - row
        low, least = lower_bound(inside), lower_bound(stored)
        high, most = upper_bound(inside), upper_bound(stored)
        if low is None or least is None or high is None or most is None:
            return True
        return is_at_least(low - least, 0) and is_at_least(most - high, 0)

    def check_primitive(self, node: Apply) -> None:
        prim, args = node.prim, node.args
        name, count = prim.name.lower(), argument_count(prim)
        self.need(len(args) == count, f"{name} takes {count} arguments, not {len(args)}")
        same = args[1:] if prim is Prim.WHERE else args
        if prim is Prim.WHERE:
            self.need_type(args[0], DType.BOOL, "the condition of where")
        types = {arg.dtype for arg in same}
        self.need(len(types) == 1, f"{name} takes one type, not {[arg.dtype for arg in same]}")
        dtype = same[0].dtype
        self.need(_TAKES.get(prim, _is_float)(dtype), f"{name} does not take {dtype!r}")
        self.need_type(node, result_dtype(prim, args), f"the result of {name}")

    # --- indices ---

    def check_index(self, index: Index) -> None:
        for axis in index.axes:
            self.need(axis in self.scope, f"axis {axis.name} is not in scope")
        for atom in index_parts(index):
            if isinstance(atom, Element):
                is_integer = _is_integer(atom.expr.dtype)
                self.need(is_integer, f"an index is computed in {atom.expr.dtype!r}")
            elif isinstance(atom, Quotient | Remainder):
                high = upper_bound(atom.by)
                is_wrong = high is not None and is_at_least(-high, 0)
                self.need(not is_wrong, f"{atom} divides by a number that is not positive")

    def check_bounds(self, buffer: Buffer, index: Index) -> None:
        if any(axis.size.constant == 0 for axis in self.scope):
            return
        high, low = upper_bound(index), lower_bound(index)
        if high is None or low is None:
            return
        # The bounds of a plain index are reached; those of others may be too wide.
        most, least = (high, low) if _reaches_bounds(index) else (low, high)
        self.need(not is_at_least(most - buffer.size, 0), f"{buffer.name} ends before {index}")
        self.need(not is_at_least(-least, 1), f"{index} is negative")

    def check_shared_stores(self) -> None:
        """Outer iterations run in any order: two of them may not store to one element."""
        stores = [s for s in self.kernel.statements if isinstance(s, Store)]
        for one, other in combinations(stores, 2):
            if one.buffer is not other.buffer or one.buffer.is_scratch:
                continue
            apart = (one.index - other.index).constant
            if apart is None:
                continue
            for axis in self.kernel.outer:
                self.at = other
                self.need(
                    not _is_step(apart, axis, one.index),
                    f"two iterations of {axis.name} store to one element of {one.buffer.name}",
                )
        self.at = None


def _outer_part(index: Index, outer: Sequence[Axis]) -> Index:
    """The terms of an index that outer axes move."""
    moved = [term for term in index.terms if not Index((term,)).axes.isdisjoint(outer)]
    return Index(tuple(moved))


def _guarded(statement: Statement) -> set[Expr]:
    """Expressions that are computed only where a choice says so."""
    found: set[Expr] = set()
    stack = [side for n in nodes(statement) if isinstance(n, Within) for side in n.operands]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            stack += children(current)
    return found


def _is_step(apart: int, axis: Axis, index: Index) -> bool:
    """Whether some steps of `axis`, at least one, move `index` by `apart`."""
    factor = index.factor_of(axis)
    step = None if factor is None else factor.constant
    length = axis.size.constant
    if not step or length is None or not apart:
        return False
    return apart % step == 0 and abs(apart // step) < length


def _reaches_bounds(index: Index) -> bool:
    """Whether it is a sum in which each axis stands once, so that axes move apart."""
    atoms = [atom for product, _ in index.terms for atom in product]
    axes = [atom for atom in atoms if isinstance(atom, Axis)]
    is_plain = all(isinstance(atom, Axis | Symbol) for atom in atoms)
    return is_plain and len(axes) == len(set(axes))
