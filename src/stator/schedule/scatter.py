"""Scatters: no two threads may touch one element, so they share out axes that keep apart.

An axis that moves the place by a known step can be shared; the others run in order inside.  So the
result is the same at every run, whatever the number of threads.
"""

from __future__ import annotations

from typing import Final

from stator.loops.index import Axis, Index, Leaf, is_at_least, lower_bound, upper_bound
from stator.loops.ir import Kernel, Stage, Store
from stator.lower.items import Scatter

BLOCK: Final = 256  # elements next to each other that one thread takes, at most


def scatter_kernel(name: str, item: Scatter) -> Kernel:
    """One kernel for `item`."""
    apart = [axis for axis in item.axes if _keeps_apart(axis, item)]
    inner = tuple(axis for axis in item.axes if axis not in apart)
    store = Store(item.buffer, item.index, item.value, item.combine)
    if not apart:
        return Kernel(name, (), (Stage(inner, (store,), in_order=True),))
    *outer, last = apart
    block = _block(last.size.constant or 0)
    if inner and item.index.factor_of(last) is not Index.of(1):
        return Kernel(name, tuple(apart), (Stage(inner, (store,), in_order=True),))
    if block is None or item.index.factor_of(last) is not Index.of(1):
        # The last axis stays inside, where it becomes vectors; those before it are shared.
        return Kernel(name, tuple(outer), (Stage((*inner, last), (store,), in_order=True),))
    across, column = Axis("block", last.size // block), Axis("column", Index.of(block))
    at: dict[Leaf, Index] = {last: Index.of(across) * block + Index.of(column)}
    store = Store(item.buffer, item.index.replaced(at), item.value.replaced(at), item.combine)
    return Kernel(name, (*outer, across), (Stage((*inner, column), (store,), in_order=True),))


def _keeps_apart(axis: Axis, item: Scatter) -> bool:
    """Whether different positions of the axis always mean different elements.

    They do if it moves within a stretch that every other part of the place jumps over, or if the
    other part moves within one step of it.
    """
    step, length = dict(item.index.terms).get((axis,)), axis.size.constant
    if not step or not length or step < 0:
        return False
    others = [(p, f) for p, f in item.index.terms if p != (axis,)]
    small = Index(tuple((p, f) for p, f in others if f % (step * length)))
    low, high = lower_bound(small), upper_bound(small)
    if low is None or high is None:
        return False
    return is_at_least(low, 0) and is_at_least(step - high, 1)


def _block(length: int) -> int | None:
    """The largest part of `length` that one thread may take; None if it has no good ones."""
    return next((n for n in range(min(BLOCK, length // 2), 15, -1) if length % n == 0), None)
