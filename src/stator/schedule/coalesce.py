"""Fewer axes: those of one point go, neighbours that every index steps through as one join."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from stator.loops.access import indices
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import Accumulate, Kernel, Stage, Statement, Store


def coalesce(kernel: Kernel) -> Kernel:
    """Drop axes of one point, join neighbouring axes that all indices step through as one."""
    kernel = _without_points(kernel)
    while (pair := _stepping_as_one(kernel.outer, kernel.statements)) is not None:
        kernel = _join_outer(kernel, *pair)
    return Kernel(kernel.name, kernel.outer, tuple(_coalesced(s) for s in kernel.stages))


def _without_points(kernel: Kernel) -> Kernel:
    """The innermost axis is the one that becomes vectors: it had better have a length."""
    one, first = Index.of(1), Index.of(0)
    place: dict[Leaf, Index] = {a: first for a in kernel.outer if a.size is one}
    stages = []
    for stage in kernel.stages:
        # A stage that accumulates keeps an axis to do it along.
        long = tuple(a for a in stage.inner if a.size is not one) or stage.inner[-1:]
        own = place | {a: first for a in stage.inner if a not in long}
        body = tuple(moved(s, own) for s in stage.body) if own else stage.body
        stages.append(Stage(long, body, stage.in_order))
    outer = tuple(a for a in kernel.outer if a not in place)
    return Kernel(kernel.name, outer, tuple(stages))


def _coalesced(stage: Stage) -> Stage:
    while (pair := _stepping_as_one(stage.inner, stage.body)) is not None:
        first, second = pair
        place, joint = _joint(first, second)
        inner = tuple(joint if a is first else a for a in stage.inner if a is not second)
        stage = Stage(inner, tuple(moved(s, place) for s in stage.body), stage.in_order)
    return stage


def _joint(first: Axis, second: Axis) -> tuple[dict[Leaf, Index], Axis]:
    joint = Axis(f"{first.name}x", first.size * second.size)
    return {first: Index.of(joint) // second.size, second: Index.of(joint) % second.size}, joint


def _join_outer(kernel: Kernel, first: Axis, second: Axis) -> Kernel:
    place, joint = _joint(first, second)
    outer = tuple(joint if a is first else a for a in kernel.outer if a is not second)
    stages = tuple(
        Stage(s.inner, tuple(moved(b, place) for b in s.body), s.in_order) for s in kernel.stages
    )
    return Kernel(kernel.name, outer, stages)


def moved(statement: Statement, place: Mapping[Leaf, Index]) -> Statement:
    """A statement with other indices for some axes."""
    value = statement.value.replaced(place)
    if isinstance(statement, Store):
        return Store(statement.buffer, statement.index.replaced(place), value, statement.combine)
    return Accumulate(statement.name, statement.combine, value)


def _stepping_as_one(
    axes: tuple[Axis, ...], statements: tuple[Statement, ...]
) -> tuple[Axis, Axis] | None:
    """The first neighbours that all indices step through as one."""
    if len(axes) < 2:
        return None
    found = dict.fromkeys(index for s in statements for index in indices(s))
    return next((p for p in pairwise(axes) if all(_is_linear(i, *p) for i in found)), None)


def _is_linear(index: Index, first: Axis, second: Axis) -> bool:
    large, small = index.factor_of(first), index.factor_of(second)
    return large is not None and small is not None and large is small * second.size
