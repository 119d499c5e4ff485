"""What a kernel looks like from outside: arguments, sizes, the shape of its loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stator.codegen.llvm import math
from stator.core.dtypes import DType
from stator.loops.access import indices, nodes
from stator.loops.index import (
    Axis,
    Clamped,
    Index,
    Quotient,
    Remainder,
    Symbol,
)
from stator.loops.ir import (
    Apply,
    Buffer,
    Kernel,
    Load,
    Statement,
    Store,
    Within,
)
from stator.loops.prims import Prim
from stator.loops.values import product
from stator.schedule.columns import block_count, block_width, is_columnar

MATH_COST: Final = 24  # operations of a mathematical function
SIDE: Final = 16  # of a tile, in elements; for f32 its row is one cache line


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
    for atoms, _ in index.terms:
        for atom in atoms:
            if isinstance(atom, Symbol):
                found[atom] = None
            elif isinstance(atom, Quotient | Remainder):
                _collect(atom.value, found)
                _collect(atom.by, found)
            elif isinstance(atom, Clamped):
                for part in (atom.value, atom.low, atom.high):
                    _collect(part, found)
            elif isinstance(atom, Axis):
                _collect(atom.size, found)


def has_vectors(body: Sequence[Statement], axis: Axis) -> bool:
    """Whether LLVM can make vectors of a loop over `axis`.

    Not of calls to libm; nor where two points may combine into one element.
    """
    for statement in body:
        if isinstance(statement, Store) and statement.combine is not None:
            step = statement.index.factor_of(axis)
            if step is None or not step.terms:
                return False
    return not any(pair in math.LIBM for pair in needed_math(body))


def widest(body: Iterable[Statement]) -> int:
    """Bytes of the widest type that is computed in."""
    return max(node.dtype.computed_in.bytes for statement in body for node in nodes(statement))


def cost_of(body: Sequence[Statement]) -> int:
    """Operations at one point, roughly: what each takes of the machine."""
    parts = {node for statement in body for node in nodes(statement)}
    applied = [node for node in parts if isinstance(node, Apply)]
    dear = [node for node in applied if (node.prim, node.args[-1].dtype) in math.FUNCTIONS]
    return len(applied) + (MATH_COST - 1) * len(dear) + len(body)


def transposed(kernel: Kernel) -> tuple[Axis, tuple[Load, ...]] | None:
    """The axis along which some loads lie, and these; None if the kernel has none such."""
    if len(kernel.outer) < 2 or any(stage.inner for stage in kernel.stages):
        return None
    parts = [node for statement in kernel.statements for node in nodes(statement)]
    if any(isinstance(part, Within) for part in parts):
        return None  # they may only load where the choice says so
    *others, last = kernel.outer
    found: dict[Axis, list[Load]] = {}
    for load in {part: None for part in parts if isinstance(part, Load)}:
        step = load.index.factor_of(last)
        if step is None or step.constant in (0, 1):
            continue
        for axis in others:
            if load.index.factor_of(axis) is Index.of(1):
                found.setdefault(axis, []).append(load)
    sides = [axis for axis in found if _is_long(axis)]
    if not sides or not _is_long(last):
        return None
    best = max(sides, key=lambda axis: len(found[axis]))
    return best, tuple(found[best])


def _is_long(axis: Axis) -> bool:
    return axis.size.constant is None or axis.size.constant >= SIDE


def outer_count(kernel: Kernel) -> Index:
    """How many outer iterations (blocks of columns, stripes of tiles) threads share."""
    outer = list(kernel.outer)
    if is_columnar(kernel):
        return block_count(kernel, block_width(kernel))
    turned = transposed(kernel)
    if turned is not None:
        side, _ = turned
        rows = [axis.size for axis in outer[:-1] if axis is not side]
        return product(rows) * ((side.size + (SIDE - 1)) // SIDE)
    return product([axis.size for axis in outer])
