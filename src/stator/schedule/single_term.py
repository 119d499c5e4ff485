"""Sums of which one term at most is not zero: the term takes the place of the sum.

The backward of a loss over classes has one in every row: its gradient is zero but for the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stator.loops.build import Body
from stator.loops.index import Axis, Index
from stator.loops.ir import Apply, Combine, Const, Expr, IndexValue
from stator.loops.prims import Prim

_b = Body()


def single_term(combine: Combine, value: Expr, inner: Sequence[Axis]) -> Expr | None:
    """What the sum of `value` over `inner` is; None unless one term alone can be other than 0.

    before: sum over r of where(r == t and c, x, 0)      t, c and x the same for every r
    after:  where(0 <= t < n and c, x, 0)                 n values of r
    """
    if combine is not Combine.SUM or len(inner) != 1:
        return None
    match value:
        case Apply(prim=Prim.WHERE, args=(condition, kept, Const(value=0))):
            pass
        case _:
            return None
    (axis,) = inner
    parts = list(_conjuncts(condition))
    moving = [part for part in parts if axis in part.axes]
    place = _place(moving[0], axis) if len(moving) == 1 else None
    if place is None or axis in kept.axes:
        return None
    size = IndexValue(place.dtype, axis.size)
    found = _b.and_(_b.ge(place, 0), _b.lt(place, size))
    for part in parts:
        if part is not moving[0]:
            found = _b.and_(found, part)
    return _b.where(found, kept, value.args[2])


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, Apply) and condition.prim is Prim.AND:
        for part in condition.args:
            yield from _conjuncts(part)
    else:
        yield condition


def _place(condition: Expr, axis: Axis) -> Expr | None:
    """What the axis is compared with, where the condition asks whether they are equal."""
    if not isinstance(condition, Apply) or condition.prim is not Prim.EQ:
        return None
    for count, place in (condition.args, condition.args[::-1]):
        is_count = isinstance(count, IndexValue) and count.index == Index.of(axis)
        if is_count and axis not in place.axes:
            return place
    return None
