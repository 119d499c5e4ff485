"""What a kernel looks like from outside: arguments, sizes, the shape of its loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stator.codegen.llvm import math
from stator.core.dtypes import DType
from stator.loops.access import indices, nodes
from stator.loops.index import (
    Axis,
    Index,
    Quotient,
    Remainder,
    Symbol,
)
from stator.loops.ir import (
    Accumulate,
    Apply,
    Buffer,
    Combine,
    Kernel,
    Statement,
    Store,
    loads_of,
)
from stator.loops.prims import Prim

COLUMNS: Final = 512  # columns that one outer block of a column reduction handles


def needed_math(statements: Iterable[Statement]) -> set[tuple[Prim, DType]]:
    """Math functions that the statements call."""
    used = {
        (node.prim, node.args[-1].dtype)
        for statement in statements
        for node in nodes(statement)
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
        for index in indices(statement):
            _collect(index, found)
    for buffer in kernel.scratch:
        _collect(buffer.size, found)
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


def has_vectors(body: Sequence[Statement], axis: Axis) -> bool:
    """Whether LLVM can make vectors of a loop over `axis`.

    Not of calls to libm, nor of any and all; nor where two points may combine into one element.
    """
    for statement in body:
        if statement.combine in (Combine.ANY, Combine.ALL):
            return False
        if isinstance(statement, Store) and statement.combine is not None:
            step = statement.index.factor_of(axis)
            if step is None or not step.terms:
                return False
    return not any(pair in math.LIBM for pair in needed_math(body))


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
