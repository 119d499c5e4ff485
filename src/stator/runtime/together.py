"""Launches of the same kernel on different tensors, joined into one: an optimizer's step.

before: m0 = kernel(m0, g0);  m1 = kernel(m1, g1);  …
after:  one launch over a list, whose threads share all of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stator.loops.index import Index
from stator.loops.values import product
from stator.runtime.plan import Launch, Require, Step, Together

MOST_BYTES: Final = 1 << 16  # that a launch which comes earlier may occupy longer


@dataclass(frozen=True, slots=True)
class _Facts:
    """A step and the names it deals with, looked up once."""

    step: Step
    takes: frozenset[str]
    writes: frozenset[str]
    changes: frozenset[str]  # what it makes or writes

    @staticmethod
    def of(step: Step) -> _Facts:
        writes = frozenset(step.writes)
        return _Facts(step, frozenset(step.takes), writes, writes.union(step.makes))


def join_launches(steps: Sequence[Step], hint: Callable[[Index], int]) -> list[Step]:
    """`steps` with equal launches joined, where nothing between them stands in the way."""
    left = [_Facts.of(step) for step in steps]
    joined: list[Step] = []
    while left:
        first, *left = left
        if not isinstance(first.step, Launch):
            joined.append(first.step)
            continue
        others = _companions(first, left, hint)
        taken = {id(other) for other in others}
        left = [facts for facts in left if id(facts.step) not in taken]
        joined.append(first.step if not others else Together((first.step, *others)))
    return joined


def _companions(
    first: _Facts, following: list[_Facts], hint: Callable[[Index], int]
) -> list[Launch]:
    """Later launches of the same kernel that could run right now."""
    found: list[Launch] = []
    changed, read = set(first.changes), set(first.takes)
    alike = sum(_is_alike(first.step, facts.step) for facts in following)
    for facts in following:
        step = facts.step
        if not alike or isinstance(step, Require):
            break  # what a requirement stops must not have happened
        if _is_alike(first.step, step):
            alike -= 1
            is_free = changed.isdisjoint(facts.takes) and read.isdisjoint(facts.writes)
            is_free = is_free and changed.isdisjoint(facts.writes)
            if is_free and isinstance(step, Launch) and _bytes(step, hint) <= MOST_BYTES:
                found.append(step)
        changed |= facts.changes
        read |= facts.takes
    return found


def _is_alike(first: Step, step: Step) -> bool:
    return (
        isinstance(first, Launch) and isinstance(step, Launch) and step.nameless is first.nameless
    )


def _bytes(launch: Launch, hint: Callable[[Index], int]) -> int:
    return sum(made.dtype.itemsize * hint(product(made.size)) for made in launch.allocations)
