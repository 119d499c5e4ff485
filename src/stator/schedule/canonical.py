"""Kernels without the names of a graph: layers that repeat give the same kernel, compiled once."""

from __future__ import annotations

from collections.abc import Mapping

from stator.loops.ir import Accumulate, Buffer, Expr, Kernel, Load, Stage, Statement, Store
from stator.schedule.rewrite import rewritten, rewritten_index


def canonical(kernel: Kernel) -> Kernel:
    """`kernel` with its buffers named by position; equal ones are one object."""
    arguments = (*kernel.written, *kernel.read)
    names = {b: Buffer(f"a{i}", b.dtype, b.size) for i, b in enumerate(arguments)}
    names |= {b: Buffer(f"t{i}", b.dtype, b.size, True) for i, b in enumerate(kernel.scratch)}

    def replace(load: Load) -> Expr | None:
        index = rewritten_index(load.index, replace, {})
        return Load(load.dtype, names[load.buffer], index)

    stages = tuple(
        Stage(stage.inner, tuple(_renamed(s, names, replace) for s in stage.body))
        for stage in kernel.stages
    )
    return Kernel("kernel", kernel.outer, stages)


def _renamed(statement: Statement, names: Mapping[Buffer, Buffer], replace: object) -> Statement:
    value = rewritten(statement.value, replace, {})  # type: ignore[arg-type]  # as in canonical
    if isinstance(statement, Accumulate):
        return Accumulate(statement.name, statement.combine, value)
    index = rewritten_index(statement.index, replace, {})  # type: ignore[arg-type]  # the same
    return Store(names[statement.buffer], index, value)
