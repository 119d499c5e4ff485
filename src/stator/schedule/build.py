"""From a group of loops to one kernel: stages, merged where they visit the same points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from stator.loops.index import Axis, Index
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Buffer,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    loads_of,
    walk,
)
from stator.loops.values import flat, unflat
from stator.lower.items import Compute
from stator.schedule.fuse import Group, row_dims
from stator.schedule.rewrite import rewritten, substitute

LARGEST_SCRATCH: Final = 1 << 18  # bytes that a row may keep beside it: within the second cache


def build_kernel(name: str, group: Group, wanted: set[str]) -> Kernel:
    """The kernel of `group`; buffers in `wanted` are read outside of it."""
    outer = _outer_axes(group)
    row = flat([_at(axis) for axis in outer], [axis.size for axis in outer])
    stages: list[Stage] = []
    made: dict[str, Expr] = {}  # what stands for loads of a buffer made here
    for number, member in enumerate(group.members):
        stages += _stages(number, member, group.rows, row, made, wanted)
    stages = _merge(stages)
    kernel = Kernel(name, outer, tuple(_localize(stages, group, wanted, row)))
    return coalesce(in_memory_order(kernel))


def in_memory_order(kernel: Kernel) -> Kernel:
    """Where there are no inner axes, let the last one be that along which results lie closest."""
    if any(stage.inner for stage in kernel.stages):
        return kernel
    first = next(s for s in kernel.statements if isinstance(s, Store))

    def step(axis: Axis) -> int:
        factor = first.index.factor_of(axis)
        return -(factor.constant or 0) if factor is not None else 0

    return Kernel(kernel.name, tuple(sorted(kernel.outer, key=step)), kernel.stages)


def _at(axis: Axis) -> Index:
    return Index.of(axis) if axis.size.constant != 1 else Index.of(0)


def _outer_axes(group: Group) -> tuple[Axis, ...]:
    leader = next((m for m in group.members if m.inner), group.members[0])
    count = row_dims(leader, group.rows)
    assert count is not None, "the fuser saw to it"
    return tuple(Axis(f"i{d}", axis.size) for d, axis in enumerate(leader.outer[:count]))


def _stages(
    number: int,
    member: Compute,
    rows: int,
    row: Index,
    made: dict[str, Expr],
    wanted: set[str],
) -> list[Stage]:
    count = row_dims(member, rows)
    assert count is not None, "the fuser saw to it"
    own = member.outer[:count]
    place = dict(zip(own, unflat(row, [axis.size for axis in own]), strict=True))
    rest = member.inner or member.outer[count:]
    inner = tuple(Axis(f"r{number}_{d}", axis.size) for d, axis in enumerate(rest))
    place |= {old: _at(new) for old, new in zip(rest, inner, strict=True)}
    value = substitute(member.value.replaced(place), made)
    inner = tuple(axis for axis in inner if axis.size.constant != 1)
    store = member.store.replaced(place)
    if member.combine is None:
        if not inner:  # one value a row: whoever reads it has it at hand
            made[member.name] = value
        return [Stage(inner, (Store(member.buffer, store, value),))]
    accumulated = Accumulated(value.dtype, f"acc_{number}")
    made[member.name] = accumulated
    stages = [Stage(inner, (Accumulate(accumulated.name, member.combine, value),))]
    if member.name in wanted:
        stages.append(Stage((), (Store(member.buffer, store, accumulated),)))
    return stages


# --- merging stages ---


def _merge(stages: list[Stage]) -> list[Stage]:
    """Let neighbours over the same points share one loop."""
    merged: list[Stage] = []
    for stage in stages:
        joined = _joined(merged[-1], stage) if merged else None
        if joined is None:
            merged.append(stage)
        else:
            merged[-1] = joined
    return merged


def _joined(first: Stage, second: Stage) -> Stage | None:
    """One stage for both; None where the second needs the first to be through."""
    if [a.size for a in first.inner] != [a.size for a in second.inner]:
        return None
    renamed = {old: Index.of(new) for old, new in zip(second.inner, first.inner, strict=True)}
    finished = {s.name for s in first.body if isinstance(s, Accumulate)}
    stores = {s.buffer: s for s in first.body if isinstance(s, Store)}
    values = {b: s.value for b, s in stores.items()}
    body: list[Statement] = list(first.body)
    for statement in second.body:
        value = statement.value.replaced(renamed)
        parts = list(walk(value))
        if any(isinstance(part, Accumulated) and part.name in finished for part in parts):
            return None
        for load in (part for part in parts if isinstance(part, Load)):
            if load.buffer in stores and load.index is not stores[load.buffer].index:
                return None
        value = rewritten(value, partial(_exact, values), {})
        if isinstance(statement, Store):
            index = statement.index.replaced(renamed)
            body.append(Store(statement.buffer, index, value))
        else:
            body.append(Accumulate(statement.name, statement.combine, value))
    return Stage(first.inner, tuple(body))


def _exact(values: Mapping[Buffer, Expr], load: Load) -> Expr | None:
    """The value itself, where reading it back would give the same: not after rounding."""
    value = values.get(load.buffer)
    if value is None or load.buffer.dtype.computed_in is not load.buffer.dtype:
        return None
    return value


# --- buffers that nobody else reads ---


def _localize(stages: list[Stage], group: Group, wanted: set[str], row: Index) -> list[Stage]:
    """Keep what is only read here beside the row, or not at all."""
    made = {member.name: member for member in group.members}
    read = {load.buffer.name for s in stages for st in s.body for load in loads_of(st.value)}
    renamed: dict[str, tuple[Buffer, int]] = {}
    dropped: set[str] = set()
    for name, member in made.items():
        if name in wanted or member.combine is not None:
            continue
        width = member.total // group.rows
        if name not in read:
            dropped.add(name)
        elif width * member.buffer.dtype.bytes <= LARGEST_SCRATCH:
            local = Buffer(f"{name}_row", member.buffer.dtype, Index.of(width), True)
            renamed[name] = (local, width)
    return [kept for s in stages if (kept := _with_scratch(s, renamed, dropped)) is not None]


def _with_scratch(
    stage: Stage, renamed: Mapping[str, tuple[Buffer, int]], dropped: set[str]
) -> Stage | None:
    def replace(load: Load) -> Expr | None:
        if load.buffer.name not in renamed:
            return None
        local, width = renamed[load.buffer.name]
        return Load(load.dtype, local, load.index % width)

    body: list[Statement] = []
    for statement in stage.body:
        value = rewritten(statement.value, replace, {})
        if isinstance(statement, Accumulate):
            body.append(Accumulate(statement.name, statement.combine, value))
        elif statement.buffer.name in renamed:
            local, width = renamed[statement.buffer.name]
            body.append(Store(local, statement.index % width, value))
        elif statement.buffer.name not in dropped:
            body.append(Store(statement.buffer, statement.index, value))
    return Stage(stage.inner, tuple(body)) if body else None


# --- fewer axes ---


def coalesce(kernel: Kernel) -> Kernel:
    """Join neighbouring axes that all indices step through as one."""
    changed = True
    while changed:
        changed = False
        for first, second in zip(kernel.outer, kernel.outer[1:], strict=False):
            if _steps_as_one(kernel.statements, first, second):
                kernel = _join_outer(kernel, first, second)
                changed = True
                break
    return Kernel(kernel.name, kernel.outer, tuple(_coalesced(s) for s in kernel.stages))


def _coalesced(stage: Stage) -> Stage:
    for first, second in zip(stage.inner, stage.inner[1:], strict=False):
        if _steps_as_one(stage.body, first, second):
            place, joint = _joint(first, second)
            inner = tuple(joint if a is first else a for a in stage.inner if a is not second)
            return _coalesced(Stage(inner, tuple(_moved(s, place) for s in stage.body)))
    return stage


def _joint(first: Axis, second: Axis) -> tuple[dict[Axis, Index], Axis]:
    joint = Axis(f"{first.name}x", first.size * second.size)
    return {first: Index.of(joint) // second.size, second: Index.of(joint) % second.size}, joint


def _join_outer(kernel: Kernel, first: Axis, second: Axis) -> Kernel:
    place, joint = _joint(first, second)
    outer = tuple(joint if a is first else a for a in kernel.outer if a is not second)
    stages = tuple(Stage(s.inner, tuple(_moved(b, place) for b in s.body)) for s in kernel.stages)
    return Kernel(kernel.name, outer, stages)


def _moved(statement: Statement, place: Mapping[Axis, Index]) -> Statement:
    value = statement.value.replaced(place)
    if isinstance(statement, Store):
        return Store(statement.buffer, statement.index.replaced(place), value)
    return Accumulate(statement.name, statement.combine, value)


def _steps_as_one(statements: tuple[Statement, ...], first: Axis, second: Axis) -> bool:
    return all(_is_linear(index, first, second) for s in statements for index in _indices(s))


def _indices(statement: Statement) -> list[Index]:
    found = [part.index for part in walk(statement.value) if isinstance(part, Load | IndexValue)]
    return [*found, statement.index] if isinstance(statement, Store) else found


def _is_linear(index: Index, first: Axis, second: Axis) -> bool:
    large, small = index.factor_of(first), index.factor_of(second)
    return large is not None and small is not None and large is small * second.size
