"""Launches of the same kernel on different tensors, joined into one: an optimizer's step.

before: m0 = kernel(m0, g0);  m1 = kernel(m1, g1);  …
after:  one launch over a list, whose threads share all of it
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stator.loops.index import Index
from stator.loops.ir import Kernel
from stator.loops.values import product
from stator.runtime.plan import Launch, Require, Step, Together

MOST_BYTES: Final = 1 << 16  # that a launch which comes earlier may occupy longer


def join_launches(steps: Sequence[Step], hint: Callable[[Index], int]) -> list[Step]:
    """`steps` with equal launches joined, where nothing between them stands in the way."""
    found = _Places()
    for step in steps:
        found.put(step, hint)
    return [
        Together((step, *others)) if isinstance(step, Launch) and others else step
        for step, others in found.places
    ]


@dataclass(slots=True)
class _Places:
    """Steps in order, each with launches of its kernel that run right with it."""

    places: list[tuple[Step, list[Launch]]] = field(default_factory=list)
    of_kernel: dict[Kernel, list[int]] = field(default_factory=lambda: defaultdict(list))
    # The last place where a name is made or written, and where it is read.
    changed: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: -1))
    read: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: -1))
    required: int = -1  # what a requirement stops must not have happened

    def put(self, step: Step, hint: Callable[[Index], int]) -> None:
        """At the first place of its kernel behind all that the step waits for, or at the end."""
        place = self._early(step, hint) if isinstance(step, Launch) else None
        if place is None:
            place = len(self.places)
            self.places.append((step, []))
            if isinstance(step, Launch):
                self.of_kernel[step.nameless].append(place)
        elif isinstance(step, Launch):
            self.places[place][1].append(step)
        if isinstance(step, Require):
            self.required = place
        for name in (*step.makes, *step.writes):
            self.changed[name] = max(self.changed[name], place)
        for name in step.takes:
            self.read[name] = max(self.read[name], place)

    def _early(self, launch: Launch, hint: Callable[[Index], int]) -> int | None:
        """A place among those there are; None if the launch may come no earlier than it does."""
        alike = self.of_kernel[launch.nameless]
        behind = [self.required]
        behind += [self.changed[name] for name in (*launch.takes, *launch.writes)]
        behind += [self.read[name] for name in launch.writes]
        first = bisect_right(alike, max(behind))
        if first == len(alike) or _bytes(launch, hint) > MOST_BYTES:
            return None
        return alike[first]


def _bytes(launch: Launch, hint: Callable[[Index], int]) -> int:
    return sum(made.dtype.itemsize * hint(product(made.size)) for made in launch.allocations)
