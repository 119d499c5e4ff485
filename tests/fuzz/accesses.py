"""Random indices: contiguous, transposed, broadcast, strided, reversed, folded, combined into.

Every index is in bounds for every size that its symbols can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from stator.loops.index import Axis, Index, Symbol
from tests.fuzz.choices import Choices

Range: TypeAlias = tuple[Index, Index]  # an index, and the length that it stays below
Places: TypeAlias = Callable[[Choices, Sequence[Axis]], Range]


def flat(parts: Sequence[Range]) -> Range:
    """The row-major number of a point."""
    total, length = Index.of(0), Index.of(1)
    for coordinate, own in parts:
        total, length = total * own + coordinate, length * own
    return total, length


def coordinate(choices: Choices, axis: Axis) -> Range:
    """A coordinate that goes with one axis."""
    index, size = Index.of(axis), axis.size
    match choices.below(8):
        case 3:  # backwards
            return size - 1 - index, size
        case 4:  # padded rows; every second or third
            step, padding = choices.between(1, 3), choices.between(0, 3)
            return step * index, step * size + padding
        case 5:  # behind others
            offset = choices.between(1, 5)
            return index + offset, size + offset
        case 6:  # rolled
            shift, by = choices.between(0, 4), choices.between(1, 5)
            return (index + shift) % by, Index.of(by)
        case 7:  # repeated; the numerator is negative at first
            by, back = choices.between(2, 4), choices.between(0, 5)
            moved = (index - back) // by + -(-back // by)
            return moved, (size - 1 - back) // by + -(-back // by) + 1
        case _:
            return index, size


def stored_index(choices: Choices, axes: Sequence[Axis]) -> Range:
    """An index that differs at every point of the axes."""
    if not choices.chance(2):
        return flat([(Index.of(axis), axis.size) for axis in axes])
    parts = []
    for axis in choices.shuffled(axes):
        index, kind = Index.of(axis), choices.below(4)
        if kind == 3:
            index = axis.size - 1 - index
        parts.append((index, axis.size + (1 if kind == 2 else 0)))
    index, length = flat(parts)
    offset = choices.one_of((0, 2))
    return index + offset, length + offset


def combined_index(choices: Choices, outer: Sequence[Axis], inner: Range) -> Range:
    """A place within `inner` that outer iterations have each for themselves."""
    order = choices.shuffled(outer) if choices.chance(3) else list(outer)
    return flat([*((Index.of(axis), axis.size) for axis in order), inner])


def loaded_index(choices: Choices, axes: Sequence[Axis]) -> Range:
    """An index over some of the axes."""
    kind = choices.below(8)
    kept = list(axes) if kind < 2 else [axis for axis in axes if not choices.chance(4)]
    if kind == 7:
        kept = choices.shuffled(kept)
    if kind >= 5:
        return flat([coordinate(choices, axis) for axis in kept])
    if kind == 4:
        parts = [part for axis in kept for part in _unfolded(axis)]
        return flat(choices.shuffled(parts))
    plain, length = flat([(Index.of(axis), axis.size) for axis in kept])
    if kind < 3 or not kept:
        return plain, length
    # The same elements in another shape, transposed: rows and columns from the flat number.
    columns = choices.between(2, 6)
    rows = (length - 1) // columns + 1
    return (plain % columns) * rows + plain // columns, rows * columns


def column_index(choices: Choices, axes: Sequence[Axis]) -> Range:
    """An index without gaps along the last axis."""
    kept = [axis for axis in axes[:-1] if not choices.chance(5)]
    return flat([(Index.of(axis), axis.size) for axis in (*kept, *axes[-1:])])


def turned_index(choices: Choices, axes: Sequence[Axis]) -> Range:
    """An index along the last axis, or across it."""
    order = list(axes) if choices.chance(2) else list(reversed(axes))
    return flat([(Index.of(axis), axis.size) for axis in order])


def _unfolded(axis: Axis) -> list[Range]:
    """An axis whose size is a product, as two."""
    match axis.size.terms:
        case (((Symbol() as one, Symbol() as other), 1),):
            rows, columns = Index.of(one), Index.of(other)
        case _ if axis.size.constant is not None and axis.size.constant % 2 == 0:
            rows, columns = axis.size // 2, Index.of(2)
        case _:
            return [(Index.of(axis), axis.size)]
    return [(Index.of(axis) // columns, rows), (Index.of(axis) % columns, columns)]
