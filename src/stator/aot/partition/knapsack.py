"""Which values to keep, if not all of them fit: three solvers of the same small problem.

Each takes the bytes of the items, what it is worth to keep each of them, and the room there is; it
returns the places of the items to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

Solver = Callable[[Sequence[int], Sequence[float], int], list[int]]

BUCKETS: Final = 10_000  # that the room is divided into, for dynamic programming


def exact(sizes: Sequence[int], worths: Sequence[float], room: int) -> list[int]:
    """The best choice, by integer programming."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not sizes or sum(sizes) <= room:
        return list(range(len(sizes)))
    largest = max(*sizes, 1)
    found = milp(
        -np.asarray(worths, dtype=float) / max(*worths, 1.0),
        constraints=LinearConstraint(np.asarray([sizes]) / largest, ub=[max(room, 0) / largest]),
        bounds=Bounds(0, 1),
        integrality=np.ones(len(sizes)),
    )
    if found.x is None:  # it ran out of time or memory
        return greedy(sizes, worths, room)
    chosen = [place for place, share in enumerate(found.x) if share > 0.5]
    return chosen if sum(sizes[place] for place in chosen) <= room else greedy(sizes, worths, room)


def dynamic(sizes: Sequence[int], worths: Sequence[float], room: int) -> list[int]:
    """The best choice up to rounding of sizes, by dynamic programming over what is left of room."""
    if not sizes or sum(sizes) <= room:
        return list(range(len(sizes)))
    if room <= 0:
        return [place for place, size in enumerate(sizes) if size == 0]
    unit = max(1, -(-room // BUCKETS))
    width = room // unit
    needed = [-(-size // unit) for size in sizes]  # rounded up: it fits in any case
    best = np.zeros(width + 1)
    taken = np.zeros((len(sizes), width + 1), dtype=bool)
    for place, (need, worth) in enumerate(zip(needed, worths, strict=True)):
        if need > width:
            continue
        with_it = best[: width + 1 - need] + worth
        taken[place, need:] = with_it > best[need:]
        best[need:] = np.maximum(best[need:], with_it)
    chosen = []
    for place in range(len(sizes) - 1, -1, -1):
        if taken[place, width]:
            chosen.append(place)
            width -= needed[place]
    return chosen[::-1]


def greedy(sizes: Sequence[int], worths: Sequence[float], room: int) -> list[int]:
    """What is worth most by the byte first."""
    order = sorted(range(len(sizes)), key=lambda place: -worths[place] / max(sizes[place], 1))
    chosen = []
    for place in order:
        if sizes[place] <= room:
            room -= sizes[place]
            chosen.append(place)
    return sorted(chosen)


SOLVERS: Final[Mapping[str, Solver]] = {"dp": dynamic, "ilp": exact, "greedy": greedy}
