"""Flat kernels whose last axis is short: its points are written out, the one before has vectors.

before: outer i0: 50176, i1: 3      y[3*i0 + i1] = x[50176*i1 + i0]
after:  outer i0: 50176             y[3*i0] = x[i0];  y[3*i0 + 1] = x[50176 + i0];  …

So images of three channels are laid pixel by pixel: LLVM stores what lies side by side as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stator.loops.access import nodes
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import Kernel, Load, Stage, Store, Within
from stator.schedule.coalesce import moved

# Points: with eight, shuffles of doubles take longer than single elements do.
MOST_WRITTEN_OUT: Final = 7
MOST_NODES: Final = 512  # to compute, written out
LEAST_LENGTH: Final = 64  # of the axis before


def with_last_written_out(kernel: Kernel) -> Kernel:
    """The kernel with statements for each point of its short last axis, if that makes vectors."""
    if not _is_worth_it(kernel):
        return kernel
    *outer, last = kernel.outer
    count = last.size.constant
    assert count is not None, "a short axis is of a known size"
    body = tuple(
        moved(statement, place) for place in _places(last, count) for statement in kernel.statements
    )
    return replace(kernel, outer=tuple(outer), stages=(Stage((), body),))


def _places(axis: Axis, count: int) -> list[dict[Leaf, Index]]:
    return [{axis: Index.of(number)} for number in range(count)]


def _is_worth_it(kernel: Kernel) -> bool:
    """Whether all that is stored, and all that is loaded, lies side by side or one for all."""
    if len(kernel.outer) < 2 or any(stage.inner for stage in kernel.stages):
        return False
    if kernel.shares or kernel.scratch or kernel.is_list:
        return False
    long, last = kernel.outer[-2:]
    count = last.size.constant
    if count is None or not 2 <= count <= MOST_WRITTEN_OUT:
        return False
    if long.size.constant is not None and long.size.constant < LEAST_LENGTH:
        return False
    parts = [node for statement in kernel.statements for node in nodes(statement)]
    if count * len(parts) > MOST_NODES:
        return False
    if any(isinstance(part, Within) for part in parts):
        return False  # which side it is may differ from point to point
    stores = [statement for statement in kernel.statements if isinstance(statement, Store)]
    if any(store.combine is not None for store in stores):
        return False
    dense = (Index.of(count), Index.of(1))
    if any(_steps(store.index, long, last) != dense for store in stores):
        return False
    loads = [_steps(part.index, long, last) for part in parts if isinstance(part, Load)]
    return all(steps == dense or _is_even(steps[0]) for steps in loads)


def _steps(index: Index, *axes: Axis) -> tuple[Index | None, ...]:
    return tuple(index.factor_of(axis) for axis in axes)


def _is_even(step: Index | None) -> bool:
    """Whether a load along the long axis is of neighbours, or of one element for all."""
    return step is not None and step.constant in (0, 1)
