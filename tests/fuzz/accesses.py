"""Random indices: contiguous, transposed, broadcast, strided, reversed, folded, gathered.

Every index is in bounds for every size that its symbols can have.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hypothesis import strategies as st

from stator.core.dtypes import DType
from stator.loops.build import apply, const
from stator.loops.index import Axis, Element, Index
from stator.loops.ir import Buffer, Expr, Load
from stator.loops.prims import Prim

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]

# Loaded where an index that counts from the end is computed: torch's negative indices.
SIGNED: Final = "signed"


Range: TypeAlias = tuple[Index, Index]  # an index, and the length that it stays below


def flat(parts: Sequence[Range]) -> Range:
    """The row-major number of a point."""
    total, length = Index.of(0), Index.of(1)
    for coordinate, own in parts:
        total, length = total * own + coordinate, length * own
    return total, length


def coordinate(draw: Draw, axis: Axis) -> Range:
    """A coordinate that goes with one axis."""
    index, size = Index.of(axis), axis.size
    match draw(st.integers(0, 9)):
        case 0:  # backwards
            return size - 1 - index, size
        case 1:  # padded rows
            return index, size + draw(st.integers(1, 3))
        case 2:  # every second or third
            step = draw(st.integers(2, 3))
            return step * index, step * size
        case 3:  # behind others
            offset = draw(st.integers(1, 5))
            return index + offset, size + offset
        case 4:  # rolled
            shift = draw(st.integers(0, 4))
            by = draw(st.integers(1, 5))
            return (index + shift) % by, Index.of(by)
        case 5:  # repeated; the numerator is negative at first
            by, back = draw(st.integers(2, 4)), draw(st.integers(0, 5))
            moved = (index - back) // by + -(-back // by)
            return moved, (size - 1 - back) // by + -(-back // by) + 1
        case _:
            return index, size


def stored_index(draw: Draw, axes: Sequence[Axis]) -> Range:
    """An index that differs at every point of the axes."""
    order = list(axes) if draw(st.booleans()) else draw(st.permutations(axes))
    parts = []
    for axis in order:
        index = Index.of(axis)
        padding = draw(st.sampled_from((0, 0, 0, 1)))
        if draw(st.sampled_from((False, False, False, True))):
            index = axis.size - 1 - index
        parts.append((index, axis.size + padding))
    index, length = flat(parts)
    offset = draw(st.sampled_from((0, 0, 0, 2)))
    return index + offset, length + offset


def loaded_index(draw: Draw, axes: Sequence[Axis]) -> Range:
    """An index over some of the axes."""
    kept = [axis for axis in axes if draw(st.sampled_from((True, True, True, False)))]
    kind = draw(st.integers(0, 5))
    if kind == 5:
        kept = list(draw(st.permutations(kept)))
    if kind >= 4:
        return flat([coordinate(draw, axis) for axis in kept])
    plain, length = flat([(Index.of(axis), axis.size) for axis in kept])
    if kind < 3 or not kept:
        return plain, length
    # The same elements in another shape, transposed: rows and columns from the flat number.
    columns = draw(st.integers(2, 6))
    rows = (length - 1) // columns + 1
    return (plain % columns) * rows + plain // columns, rows * columns


def gather(draw: Draw, axes: Sequence[Axis], fresh: Callable[[str], str], dtype: DType) -> Load:
    """A load whose row another buffer names."""
    place, length = loaded_index(draw, axes)
    is_signed = draw(st.booleans())
    name = fresh(SIGNED if is_signed else "rows")
    row: Expr = Load(DType.I64, Buffer(name, DType.I64, length), place)
    rows = draw(st.integers(1, 9))
    if is_signed:
        behind = apply(Prim.ADD, row, const(rows, DType.I64))
        row = apply(Prim.WHERE, apply(Prim.LT, row, const(0, DType.I64)), behind, row)
    column, width = loaded_index(draw, axes[-1:])
    buffer = Buffer(fresh("table"), dtype, width * rows)
    return Load(dtype.computed_in, buffer, width * Element(row) + column)
