"""Loops split where choices change, so that no iteration has to choose.

before: stage i: 64   out[i] = within(i, 32, neg(x[i + 32]), x[i - 32])
after:  stage i: 32   out[i] = neg(x[i + 32])
        stage i: 32   out[i + 32] = x[i]
"""

from __future__ import annotations

from typing import Final

from stator.loops.access import nodes
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import Accumulate, Kernel, Stage, Statement, Store, Within
from stator.loops.values import product
from stator.lower.sizes import Sizes

MOST_PARTS: Final = 4  # of one loop: each is code of its own
ENOUGH_ROWS: Final = 16  # so that threads still have something to share


def split_choices(kernel: Kernel, sizes: Sizes) -> Kernel:
    """The kernel with its innermost loops split; they move inside of the rows for that."""
    if any(stage.inner for stage in kernel.stages):
        stages = tuple(part for stage in kernel.stages for part in _split(stage))
        return Kernel(kernel.name, kernel.outer, stages)
    if not kernel.outer or len(kernel.stages) != 1:
        return kernel
    *outer, last = kernel.outer
    if sizes.hint(product([axis.size for axis in outer])) < ENOUGH_ROWS:
        return kernel
    parts = _split(Stage((last,), kernel.stages[0].body))
    return kernel if len(parts) == 1 else Kernel(kernel.name, tuple(outer), tuple(parts))


def _split(stage: Stage) -> list[Stage]:
    if not stage.inner or stage.in_order:
        return [stage]
    *outer, axis = stage.inner
    length = axis.size.constant
    if length is None or any(isinstance(s, Accumulate) for s in stage.body):
        return [stage]
    edges = sorted({edge for s in stage.body for edge in _edges(s, axis) if 0 < edge < length})
    if not edges or len(edges) >= MOST_PARTS:
        return [stage]
    parts = []
    for number, (low, high) in enumerate(zip([0, *edges], [*edges, length], strict=True)):
        part = Axis(f"{axis.name}_{number}", Index.of(high - low))
        at: dict[Leaf, Index] = {axis: (Index.of(part) if high - low > 1 else Index.of(0)) + low}
        inner = (*outer, part) if high - low > 1 else tuple(outer)
        parts.append(Stage(inner, tuple(_moved(s, at) for s in stage.body)))
    return parts


def _moved(statement: Statement, at: dict[Leaf, Index]) -> Statement:
    assert isinstance(statement, Store), "loops that accumulate stay whole"
    index = statement.index.replaced(at)
    return Store(statement.buffer, index, statement.value.replaced(at), statement.combine)


def _edges(statement: Statement, axis: Axis) -> list[int]:
    """Positions of `axis` at which a choice of the statement changes."""
    found = []
    for node in nodes(statement):
        if isinstance(node, Within) and node.index.axes == {axis}:
            step, limit = node.index.factor_of(axis), node.limit.constant
            start = None if step is None else (node.index - Index.of(axis) * step).constant
            if limit is None or start is None or step is None or not step.constant:
                continue
            if step.constant > 0:
                found += [-(start // step.constant), -((start - limit) // step.constant)]
            else:
                found += [(-start) // step.constant + 1, (limit - start) // step.constant + 1]
    return found
