"""How much a kernel for a GPU computes again, where loops read each other at several places.

y[i] = sin(x[i] + x[i + 1]);  z[i] = sin(y[i] + y[i + 2]);  ...     x at two places, four, eight

There what a member makes stays a value (registers.py): it is computed for each place of it that is
read.  On a CPU it lies beside the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from stator.loops.index import Index, Leaf
from stator.loops.ir import index_parts, walk
from stator.lower.items import Compute
from stator.schedule.rows import coordinates

# Operations and parts of indices.  Ten steps of such a chain, at strides of 1, 2, 4, ..., were
# 7,182 lines; compiling takes 3 milliseconds a line.
MOST_AGAIN: Final = 512


def computed_again(item: Compute, members: Sequence[Compute]) -> int:
    """What `item` would have members compute beyond once; counted a little over MOST_AGAIN."""
    makers = {member.name: member for member in members if not member.leads}
    read: dict[str, set[tuple[Index, ...]]] = {}
    stack: list[tuple[Compute, Mapping[Leaf, Index]]] = [(item, {})]
    again = 0
    while stack and again <= MOST_AGAIN:
        reader, place = stack.pop()
        for load in reader.loads:
            maker = makers.get(load.buffer.name)
            if maker is None:
                continue
            point = tuple(coordinates(load.index.replaced(place), maker) or ())
            places = read.setdefault(maker.name, set())
            if point in places:
                continue
            if places:
                again += sum(1 for _ in walk(maker.value)) + sum(map(_length, point))
            places.add(point)
            stack.append((maker, dict(zip(maker.outer, point, strict=False))))
    return again


def _length(index: Index) -> int:
    """Parts of an index, as far as they count."""
    return sum(1 for _ in islice(index_parts(index), MOST_AGAIN))
