"""Which outer iteration stores to an element: the row that it belongs to.

Rows run in any order and at the same time.  One that stores over what it reads may have read any
element of its own before its loop that stores, wherever that one comes by: no other row stores to
it, and none reads what this one stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from stator.loops.index import Axis, Index, is_at_least


def stays_in_row(outer: Sequence[Axis], stored: Index, read: Sequence[Index]) -> bool:
    """Whether no row reads what another row stores.

    A row is found from the element that it stores to: of `i + 8*r`, where i is below 8, it is the
    element modulo 8.  What `read` comes to that way must be the row that reads, wherever in its
    loops it is.
    """
    written, *elements = (_without_still_axes(index) for index in (stored, *read))
    return not elements or all(
        _row_of(element, axis, written) is Index.of(axis)
        for axis in outer
        if axis.size.constant != 1
        for element in (written, *elements)
    )


def _row_of(element: Index, axis: Axis, stored: Index) -> Index | None:
    """Where an axis stands in the row that stores to an element; None if that says it not."""
    step = stored.factor_of(axis)
    if step is None or not step.terms or step.axes or not is_at_least(step, 0):
        return None
    return element // step % axis.size


def _without_still_axes(index: Index) -> Index:
    """An axis of a single position stands at 0."""
    return index.replaced({a: Index.of(0) for a in index.axes if a.size.constant == 1})
