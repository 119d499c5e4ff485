"""Which kernels run by columns: their rows lie across memory, next to each other."""

from __future__ import annotations

from typing import Final

from stator.loops.access import nodes
from stator.loops.index import Axis, Index
from stator.loops.ir import Accumulate, Kernel, Load, Stage, Store
from stator.loops.values import product

MOST_COLUMNS: Final = 512  # rows next to each other that one outer iteration handles
FEWEST_COLUMNS: Final = 32  # two cache lines of f32
ENOUGH_BLOCKS: Final = 8  # so that threads have something to share
LARGEST_SCRATCH: Final = 1 << 19  # bytes that a block of columns may keep beside it


def is_columnar(kernel: Kernel) -> bool:
    """Whether every access inside of a row has its neighbour in the next row, or is the same there.

    So for sums over the first axis of a matrix: along a row memory jumps, across rows it does not.
    """
    if not kernel.outer:
        return False
    last = kernel.outer[-1]
    inside = [stage for stage in kernel.stages if stage.inner]
    if not any(isinstance(s, Accumulate) for stage in inside for s in stage.body):
        return False
    if scratch_bytes(kernel) > LARGEST_SCRATCH:
        return False
    return all(_lies_across(stage, last) for stage in inside)


def _lies_across(stage: Stage, last: Axis) -> bool:
    own = set(stage.inner)
    places: list[Index] = []
    for statement in stage.body:
        loads = [n for n in nodes(statement) if isinstance(n, Load)]
        places += [n.index for n in loads if not n.buffer.is_scratch]
        if isinstance(statement, Store) and not statement.buffer.is_scratch:
            places.append(statement.index)
    moving = [place for place in places if place.axes & own]
    steps = [place.factor_of(last) for place in moving]
    one = Index.of(1)
    return one in steps and all(step is one or step is Index.of(0) for step in steps)


def scratch_bytes(kernel: Kernel) -> int:
    """Bytes that a block of columns keeps; those of unknown size count for nothing."""
    width = block_width(kernel)
    return sum((b.size.constant or 0) * b.dtype.bytes * width for b in kernel.scratch)


def block_width(kernel: Kernel) -> int:
    """How many rows that lie next to each other one outer iteration handles."""
    width = MOST_COLUMNS
    while width > FEWEST_COLUMNS and (block_count(kernel, width).constant or ENOUGH_BLOCKS) < (
        ENOUGH_BLOCKS
    ):
        width //= 2
    return width


def block_count(kernel: Kernel, width: int) -> Index:
    """Outer iterations of a kernel that runs by columns."""
    *outer, last = kernel.outer
    return product([axis.size for axis in outer]) * ((last.size + (width - 1)) // width)
