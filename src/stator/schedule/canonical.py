"""Kernels without the names of a graph: layers that repeat give the same kernel, compiled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from stator.loops.access import indices
from stator.loops.index import Axis, Index, Leaf, Symbol
from stator.loops.ir import Accumulate, Buffer, Expr, Kernel, Load, Stage, Statement, Store
from stator.schedule.rewrite import rewritten, rewritten_index

LONG_ENOUGH: Final = 64  # a loop for which knowing the length changes nothing


@dataclass(frozen=True, slots=True)
class Canonical:
    """A kernel by positions: buffers and sizes in the order in which its entry takes them."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]  # of the graph
    sizes: tuple[Index, ...]


def canonical(kernel: Kernel, *, any_length: bool = True) -> Canonical:
    """`kernel` with all that has a name named by position; equal ones are one object.

    `any_length`: those that differ in the length of one flat loop are equal as well.
    """
    kernel, length = _of_any_length(kernel) if any_length else (kernel, {})
    arguments = (*kernel.written, *kernel.read)
    symbols = _symbols(kernel)
    named: dict[Leaf, Index] = {
        s: Index.of(Symbol(f"n{i:03}", s.is_signed)) for i, s in enumerate(symbols)
    }
    axes = {
        axis: Axis(f"i{number}", axis.size.replaced(named))
        for number, axis in enumerate(dict.fromkeys(_axes(kernel)))
    }
    renaming = _Renaming(
        _renamed(arguments, "a")
        | _renamed(tuple(old for _, old in kernel.shares), "b")
        | _renamed(kernel.scratch, "t", named),
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
    outer = tuple(axes[axis] for axis in kernel.outer)
    shares = tuple((renaming.buffers[new], renaming.buffers[old]) for new, old in kernel.shares)
    renamed = Kernel("kernel", outer, stages, shares, kernel.is_list)
    # In the order of the renamed kernel: terms of an index are sorted by names, gathers among them.
    old = {new: buffer for buffer, new in renaming.buffers.items()}
    arguments = tuple(old[buffer] for buffer in (*renamed.written, *renamed.read))
    sizes = tuple(length.get(symbol, Index.of(symbol)) for symbol in symbols)
    return Canonical(renamed, arguments, sizes)


def _of_any_length(kernel: Kernel) -> tuple[Kernel, dict[Symbol, Index]]:
    """A kernel of one flat loop, with its length as a symbol: others differ in nothing else."""
    if len(kernel.outer) != 1 or any(stage.inner for stage in kernel.stages):
        return kernel, {}
    (axis,) = kernel.outer
    length = axis.size.constant
    # Updates in place come in lists of all lengths, and run over these as one.
    if length is None or length < (LONG_ENOUGH if not kernel.shares else 2):
        return kernel, {}
    symbol = Symbol("length")
    anew = Axis(axis.name, Index.of(symbol))
    at: dict[Leaf, Index] = {axis: Index.of(anew)}
    body = tuple(_moved(s, at) for s in kernel.statements)
    return replace(kernel, outer=(anew,), stages=(Stage((), body),)), {symbol: Index.of(length)}


def _moved(statement: Statement, at: Mapping[Leaf, Index]) -> Statement:
    assert isinstance(statement, Store), "a flat loop accumulates nothing"
    value, index = statement.value.replaced(at), statement.index.replaced(at)
    return Store(statement.buffer, index, value, statement.combine)


@dataclass(frozen=True, slots=True)
class _Renaming:
    buffers: Mapping[Buffer, Buffer]
    leaves: Mapping[Leaf, Index]
    seen: dict[Expr, Expr] = field(default_factory=dict)  # what gathers read, in many of them

    def statement(self, statement: Statement) -> Statement:
        value = rewritten(statement.value.replaced(self.leaves), self.load, self.seen)
        if isinstance(statement, Accumulate):
            return Accumulate(statement.name, statement.combine, value)
        index = rewritten_index(statement.index.replaced(self.leaves), self.load, self.seen)
        return Store(self.buffers[statement.buffer], index, value, statement.combine)

    def load(self, load: Load, index: Index) -> Expr | None:
        return Load(load.dtype, self.buffers[load.buffer], index)


def _renamed(
    buffers: tuple[Buffer, ...], letter: str, sizes: Mapping[Leaf, Index] | None = None
) -> dict[Buffer, Buffer]:
    """Buffers named by position; how long arguments are is not the kernel's matter."""
    found = {}
    for number, buffer in enumerate(buffers):
        size = Index.of(0) if sizes is None else buffer.size.replaced(sizes)
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
