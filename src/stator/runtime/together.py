"""Launches of the same kernel on different tensors, joined into one: an optimizer's step.

before: m0 = kernel(m0, g0);  m1 = kernel(m1, g1);  …
after:  one launch over a list, whose threads share all of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from stator.loops.index import Index
from stator.loops.values import product
from stator.runtime.plan import Launch, Require, Step, Together

MOST_BYTES: Final = 1 << 16  # that a launch which comes earlier may occupy longer


def join_launches(steps: Sequence[Step], hint: Callable[[Index], int]) -> list[Step]:
    """`steps` with equal launches joined, where nothing between them stands in the way."""
    left = list(steps)
    joined: list[Step] = []
    while left:
        step = left.pop(0)
        if not isinstance(step, Launch):
            joined.append(step)
            continue
        others = _companions(step, left, hint)
        left = [other for other in left if other not in others]
        joined.append(step if not others else Together((step, *others)))
    return joined


def _companions(first: Launch, following: list[Step], hint: Callable[[Index], int]) -> list[Launch]:
    """Later launches of the same kernel that could run right now."""
    found: list[Launch] = []
    if not any(_is_alike(first, step) for step in following):
        return found
    changed = {*first.makes, *first.writes}
    read = set(first.takes)
    for step in following:
        if isinstance(step, Require):
            break  # what it stops must not have happened
        is_free = changed.isdisjoint(step.takes) and read.isdisjoint(step.writes)
        if _is_alike(first, step) and is_free and changed.isdisjoint(step.writes):
            assert isinstance(step, Launch), "only launches are alike"
            if _bytes(step, hint) <= MOST_BYTES:
                found.append(step)
        changed.update(step.makes, step.writes)
        read.update(step.takes)
    return found


def _is_alike(first: Launch, step: Step) -> bool:
    return isinstance(step, Launch) and step.nameless is first.nameless


def _bytes(launch: Launch, hint: Callable[[Index], int]) -> int:
    return sum(made.dtype.itemsize * hint(product(made.size)) for made in launch.allocations)
