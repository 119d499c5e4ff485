"""Parts of a kernel, in the order in which its text names them."""

from __future__ import annotations

from stator.loops.index import Index, Symbol
from stator.loops.ir import (
    Buffer,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Statement,
    Store,
    Within,
    children,
    expressions_in,
    index_parts,
)


def roots(statement: Statement) -> tuple[Expr, ...]:
    """Expressions that a statement computes: those of its index, then its value."""
    if isinstance(statement, Store):
        return (*expressions_in(statement.index), statement.value)
    return (statement.value,)


def nodes(statement: Statement) -> list[Expr]:
    """Every expression of a statement once, in the order in which the text names them."""
    found: dict[Expr, None] = {}
    stack = list(reversed(roots(statement)))
    while stack:
        current = stack.pop()
        if current not in found:
            found[current] = None
            stack += reversed(children(current))
    return list(found)


def indices(statement: Statement) -> list[Index]:
    """Every index that a statement uses, those inside of others left out."""
    found = [statement.index] if isinstance(statement, Store) else []
    for node in nodes(statement):
        if isinstance(node, Load | IndexValue | Within):
            found.append(node.index)
        if isinstance(node, Within):
            found.append(node.limit)
    return found


def buffers(kernel: Kernel) -> tuple[Buffer, ...]:
    """Every buffer that the kernel touches, in order of first use: loads first, then the store."""
    found: list[Buffer] = []
    for statement in kernel.statements:
        found += [node.buffer for node in nodes(statement) if isinstance(node, Load)]
        if isinstance(statement, Store):
            found.append(statement.buffer)
    return tuple(dict.fromkeys(found))


def symbols(index: Index) -> list[Symbol]:
    """Symbols that an index holds."""
    return [atom for atom in index_parts(index) if isinstance(atom, Symbol)]


def header_sizes(kernel: Kernel) -> list[Index]:
    """Sizes of the kernel's buffers and axes."""
    axes = [*kernel.outer, *(axis for stage in kernel.stages for axis in stage.inner)]
    return [buffer.size for buffer in buffers(kernel)] + [axis.size for axis in axes]
