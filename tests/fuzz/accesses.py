"""Random indices: contiguous, transposed, broadcast, strided, reversed, folded, gathered.

Every index is in bounds for every size that its symbols can have.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hypothesis import strategies as st

from stator.core.dtypes import DType
from stator.loops.build import apply, const
from stator.loops.index import Axis, Element, Index, upper_bound
from stator.loops.ir import Buffer, Expr, Load
from stator.loops.prims import Prim

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]

# Loaded where an index that counts from the end is computed: torch's negative indices.
SIGNED: Final = "signed"


def flat(parts: Sequence[tuple[Index, Index]]) -> Index:
    """The row-major number of a point, given each coordinate and its length."""
    total = Index.of(0)
    for coordinate, length in parts:
        total = total * length + coordinate
    return total


def buffer_for(name: str, dtype: DType, index: Index, *, is_scratch: bool = False) -> Buffer:
    """A buffer that ends where the largest value of `index` is."""
    high = upper_bound(index)
    assert high is not None, f"{index} holds a computed value"
    return Buffer(name, dtype, high + 1, is_scratch)


def coordinate(draw: Draw, axis: Axis) -> tuple[Index, Index]:
    """A coordinate that goes with one axis, and the length of its range."""
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


def stored_index(draw: Draw, axes: Sequence[Axis]) -> Index:
    """An index that differs at every point of the axes."""
    parts = []
    for axis in draw(st.permutations(axes)):
        index = Index.of(axis)
        padding = draw(st.sampled_from((0, 0, 0, 1)))
        if draw(st.sampled_from((False, False, False, True))):
            index = axis.size - 1 - index
        parts.append((index, axis.size + padding))
    if draw(st.booleans()):
        parts = sorted(parts, key=lambda part: [list(axes).index(a) for a in part[0].axes])
    offset: int = draw(st.sampled_from((0, 0, 0, 2)))
    return flat(parts) + offset


def loaded_index(draw: Draw, axes: Sequence[Axis]) -> Index:
    """An index over some of the axes."""
    kept = [axis for axis in axes if draw(st.sampled_from((True, True, True, False)))]
    kind = draw(st.integers(0, 5))
    if kind == 0:
        kept = list(draw(st.permutations(kept)))
    if kind <= 1:
        return flat([coordinate(draw, axis) for axis in kept])
    plain = flat([(Index.of(axis), axis.size) for axis in kept])
    if kind > 2 or not kept:
        return plain
    # The same elements in another shape, transposed: rows and columns from the flat number.
    columns: int = draw(st.integers(2, 6))
    high = upper_bound(plain)
    assert high is not None, "axes have sizes"
    rows = high // columns + 1
    return (plain % columns) * rows + plain // columns


def gather(draw: Draw, axes: Sequence[Axis], fresh: Callable[[str], str], dtype: DType) -> Load:
    """A load whose row another buffer names."""
    place = loaded_index(draw, axes)
    is_signed = draw(st.booleans())
    name = fresh(SIGNED if is_signed else "rows")
    row: Expr = Load(DType.I64, buffer_for(name, DType.I64, place), place)
    rows = draw(st.integers(1, 9))
    if is_signed:
        behind = apply(Prim.ADD, row, const(rows, DType.I64))
        row = apply(Prim.WHERE, apply(Prim.LT, row, const(0, DType.I64)), behind, row)
    column = loaded_index(draw, axes[-1:])
    high = upper_bound(column)
    assert high is not None, "axes have sizes"
    buffer = Buffer(fresh("table"), dtype, (high + 1) * rows)
    return Load(dtype.computed_in, buffer, (high + 1) * Element(row) + column)
