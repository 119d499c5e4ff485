"""The first element of a row, read before the loops of the row: these may then store over it.

before: stage r: s sum= x[8*i + r] - x[8*i];  stage r: y[8*i + r] = x[8*i + r] - x[8*i] - s
after:  stage: first max= x[8*i];  stage r: s sum= x[8*i + r] - first;  ...

Batch norm reads it: from there it takes the distances of all the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stator.loops.build import const
from stator.loops.index import Index
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Combine,
    Expr,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    loads_of,
    within,
)
from stator.loops.values import product
from stator.schedule.rewrite import rewritten


def read_ahead(kernel: Kernel) -> Kernel:
    """The kernel with what its loops read at the start of a row that they fill read before them."""
    made: dict[Load, Expr] = {}
    opening: list[Statement] = []
    for stage, first in _firsts(kernel):
        if first not in made:
            total = Accumulated(first.dtype, f"acc_first_{len(made)}")
            length = product([axis.size for axis in stage.inner])
            value = within(Index.of(0), length, first, const(0, first.dtype))  # an empty row
            opening.append(Accumulate(total.name, Combine.MAX, value))
            made[first] = total
    if not made:
        return kernel
    seen: dict[Expr, Expr] = {}

    def known(load: Load, _: Index) -> Expr | None:
        return made.get(load)

    loops = (
        replace(
            stage,
            body=tuple(
                replace(statement, value=rewritten(statement.value, known, seen))
                for statement in stage.body
            ),
        )
        for stage in kernel.stages
    )
    return replace(kernel, stages=(Stage((), tuple(opening)), *loops))


def start_of_row(stage: Stage, store: Store) -> Index:
    """Where a row of a stage begins that a store fills."""
    return store.index.replaced(dict.fromkeys(stage.inner, Index.of(0)))


def _firsts(kernel: Kernel) -> Iterator[tuple[Stage, Load]]:
    """Loads of what the first point of a loop may store over, with the loop."""
    for stage in kernel.stages:
        if not stage.inner or stage.in_order:
            continue
        found = (load for statement in stage.body for load in loads_of(statement.value))
        loads = {(load.buffer, load.index): load for load in found if _may_move(load, kernel)}
        for store in stage.body:
            if isinstance(store, Store) and store.combine is None:
                start = start_of_row(stage, store)
                for (buffer, index), load in loads.items():
                    if index is start is not store.index and (buffer, store.index) in loads:
                        yield stage, load


def _may_move(load: Load, kernel: Kernel) -> bool:
    """Whether an accumulator can hold what is there when the kernel begins."""
    return load.dtype.is_float and load.buffer in kernel.read and not load.buffer.is_scratch
