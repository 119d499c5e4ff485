"""Kernels without the names of a graph: layers that repeat give the same kernel, compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stator.loops.access import indices
from stator.loops.index import Axis, Index, Leaf, Symbol
from stator.loops.ir import Accumulate, Buffer, Expr, Kernel, Load, Stage, Statement, Store
from stator.schedule.rewrite import rewritten, rewritten_index


@dataclass(frozen=True, slots=True)
class Canonical:
    """A kernel by positions: buffers and sizes in the order in which its entry takes them."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]  # of the graph
    sizes: tuple[Index, ...]


def canonical(kernel: Kernel) -> Canonical:
    """`kernel` with its buffers and symbols named by position; equal ones are one object."""
    arguments = (*kernel.written, *kernel.read)
    symbols = _symbols(kernel)
    named: dict[Leaf, Index] = {s: Index.of(Symbol(f"n{i:03}")) for i, s in enumerate(symbols)}
    axes = {axis: Axis(axis.name, axis.size.replaced(named)) for axis in _axes(kernel)}
    renaming = _Renaming(
        _renamed(arguments, "a") | _renamed(kernel.scratch, "t", named),
        named | {old: Index.of(new) for old, new in axes.items() if old is not new},
    )
    stages = tuple(
        Stage(
            tuple(axes[axis] for axis in stage.inner),
            tuple(renaming.statement(s) for s in stage.body),
            stage.in_order,
        )
        for stage in kernel.stages
    )
    renamed = Kernel("kernel", tuple(axes[axis] for axis in kernel.outer), stages)
    # In the order of the renamed kernel: terms of an index are sorted by names, gathers among them.
    old = {new: buffer for buffer, new in renaming.buffers.items()}
    arguments = tuple(old[buffer] for buffer in (*renamed.written, *renamed.read))
    return Canonical(renamed, arguments, tuple(Index.of(symbol) for symbol in symbols))


@dataclass(frozen=True, slots=True)
class _Renaming:
    buffers: Mapping[Buffer, Buffer]
    leaves: Mapping[Leaf, Index]

    def statement(self, statement: Statement) -> Statement:
        value = rewritten(statement.value.replaced(self.leaves), self.load, {})
        if isinstance(statement, Accumulate):
            return Accumulate(statement.name, statement.combine, value)
        index = rewritten_index(statement.index.replaced(self.leaves), self.load, {})
        return Store(self.buffers[statement.buffer], index, value, statement.combine)

    def load(self, load: Load) -> Expr | None:
        index = rewritten_index(load.index, self.load, {})
        return Load(load.dtype, self.buffers[load.buffer], index)


def _renamed(
    buffers: tuple[Buffer, ...], letter: str, sizes: Mapping[Leaf, Index] | None = None
) -> dict[Buffer, Buffer]:
    """Buffers named by position; the lengths of arguments that are symbolic are nobody's matter."""
    found = {}
    for number, buffer in enumerate(buffers):
        size = buffer.size.replaced(sizes) if sizes is not None else buffer.size
        if sizes is None and size.constant is None:
            size = Index.of(0)
        found[buffer] = Buffer(f"{letter}{number}", buffer.dtype, size, buffer.is_scratch)
    return found


def _axes(kernel: Kernel) -> list[Axis]:
    return [*kernel.outer, *(axis for stage in kernel.stages for axis in stage.inner)]


def _symbols(kernel: Kernel) -> tuple[Symbol, ...]:
    """Symbols that the loops need, in the order of their first use."""
    found = [axis.size for axis in _axes(kernel)]
    for statement in kernel.statements:
        for index in indices(statement):
            found += [index, *(axis.size for axis in index.axes)]
    found += [buffer.size for buffer in kernel.scratch]
    ordered = [leaf for index in found for leaf in sorted(index.leaves, key=str)]
    return tuple(dict.fromkeys(leaf for leaf in ordered if isinstance(leaf, Symbol)))
