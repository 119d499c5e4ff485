"""From a group of loops to one kernel: stages, merged where they visit the same points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from stator.loops.access import nodes
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Buffer,
    Expr,
    Kernel,
    Load,
    Stage,
    Statement,
    Store,
    loads_of,
    walk,
)
from stator.loops.values import flat, product, unflat
from stator.lower.items import Compute, Scatter
from stator.lower.sizes import Sizes
from stator.schedule.coalesce import coalesce
from stator.schedule.columns import LARGEST_SCRATCH as COLUMNS_SCRATCH
from stator.schedule.columns import block_width, is_columnar
from stator.schedule.fuse import Group
from stator.schedule.idle_roundings import without_idle_roundings
from stator.schedule.read_ahead import read_ahead
from stator.schedule.rewrite import rewritten, substitute
from stator.schedule.rows import coordinates, position, row_number
from stator.schedule.scatter import scatter_kernel
from stator.schedule.single_term import single_term
from stator.schedule.split_axes import split_axes
from stator.schedule.split_choices import split_choices

LARGEST_SCRATCH: Final = 1 << 18  # bytes that a row may keep beside it: within the second cache


def build_kernel(name: str, group: Group, wanted: set[str], sizes: Sizes) -> Kernel:
    """The kernel of `group`; buffers in `wanted` are read outside of it."""
    if isinstance(group.alone, Scatter):
        return without_idle_roundings(scatter_kernel(name, group.alone))
    leader = next((m for m in group.members if m.leads), group.members[0])
    own = group.rows[leader.name]
    outer = tuple(Axis(f"i{d}", axis.size) for d, axis in enumerate(own))
    row = row_number(outer)
    stages: list[Stage] = []
    made: dict[str, Expr] = {}  # what stands for loads of a buffer made here
    for number, member in enumerate(group.members):
        stages += _stages(number, member, group.rows[member.name], row, made)
        if member.inner and member.name in wanted:
            stages.append(_stored_result(member, group.rows[member.name], row, made[member.name]))
    stages = merged_stages(stages)
    whole = Kernel(name, outer, tuple(stages))
    limit = COLUMNS_SCRATCH // block_width(whole) if is_columnar(whole) else LARGEST_SCRATCH
    kernel = Kernel(name, outer, tuple(_localize(stages, group, wanted, sizes, limit)))
    kernel = split_choices(coalesce(in_memory_order(split_axes(kernel), sizes)), sizes)
    return read_ahead(without_idle_roundings(kernel))


def in_memory_order(kernel: Kernel, sizes: Sizes) -> Kernel:
    """Where there are no inner axes, let the last one be that along which results lie closest."""
    if any(stage.inner for stage in kernel.stages):
        return kernel
    first = next(s for s in kernel.statements if isinstance(s, Store))

    def step(axis: Axis) -> int:
        factor = first.index.factor_of(axis)
        return -sizes.hint(factor) if factor is not None and not factor.axes else 0

    return Kernel(kernel.name, tuple(sorted(kernel.outer, key=step)), kernel.stages)


def _stages(
    number: int, member: Compute, own: tuple[Axis, ...], row: Index, made: dict[str, Expr]
) -> list[Stage]:
    place = place_of_rows(own, row)
    rest = member.inner or tuple(axis for axis in member.outer if axis not in own)
    inner = tuple(Axis(f"r{number}_{d}", axis.size) for d, axis in enumerate(rest))
    place |= {old: position(new) for old, new in zip(rest, inner, strict=True)}
    value = substitute(member.value.replaced(place), made)
    inner = tuple(axis for axis in inner if axis.size.constant != 1)
    if member.combine is None:
        if not inner:  # one value a row: whoever reads it has it at hand
            made[member.name] = value
        return [Stage(inner, (Store(member.buffer, member.store.replaced(place), value),))]
    total = Accumulated(value.dtype, f"acc_{number}")
    accumulate = Accumulate(total.name, member.combine, value)
    if member.scan is not None:
        running = Store(member.buffer, member.store.replaced(place), total)
        return [Stage(inner, (accumulate, running), in_order=True)]
    term = single_term(member.combine, value, inner)
    made[member.name] = total if term is None else term
    return [Stage(inner, (accumulate,))] if term is None else []


def place_of_rows(own: tuple[Axis, ...], row: Index) -> dict[Leaf, Index]:
    """Where the row axes of a member stand in a row of the kernel."""
    return dict(zip(own, unflat(row, [axis.size for axis in own]), strict=True))


def _stored_result(member: Compute, own: tuple[Axis, ...], row: Index, total: Expr) -> Stage:
    """What a reduction found, stored for others."""
    index = member.store.replaced(place_of_rows(own, row))
    return Stage((), (Store(member.buffer, index, total),))


# --- merging stages ---


def merged_stages(stages: list[Stage]) -> list[Stage]:
    """Let loops over the same points be one.

    before: loop acc_0;  store acc_0;  loop acc_1;  store acc_1    the same data is read twice
    after:  loop acc_0, acc_1;  store acc_0, acc_1
    """
    merged: list[Stage] = []
    for stage in stages:
        home = _home(merged, stage)
        joined = _joined(merged[home], stage) if merged else None
        if joined is None:
            merged.append(stage)
        else:
            merged[home] = joined
    return merged


def _home(merged: list[Stage], stage: Stage) -> int:
    """The place of the stage that `stage` might join: the last one, or the last loop before it.

    What has no inner axes, stores of totals, may stand between if it can just as well come later.
    A stage that adds nothing up stays behind it: alone, its axes may become one, and in a row that
    a GPU reads online it goes along with the totals that stand there.
    """
    last = home = len(merged) - 1
    if not stage.inner or not any(isinstance(s, Accumulate) for s in stage.body):
        return last
    while home > 0 and not merged[home].inner:
        if not _may_swap(merged[home], stage):
            return last
        home -= 1
    return home


def _may_swap(first: Stage, second: Stage) -> bool:
    """Whether two stages mean the same in the other order."""
    reads = {part for s in second.body for part in nodes(s)}
    read = {part.buffer for part in reads if isinstance(part, Load)}
    totals = {part.name for part in reads if isinstance(part, Accumulated)}
    made = {s.name for s in first.body if isinstance(s, Accumulate)}
    stored = {s.buffer for s in first.body if isinstance(s, Store)}
    used = {part.buffer for s in first.body for part in nodes(s) if isinstance(part, Load)}
    writes = {s.buffer for s in second.body if isinstance(s, Store)}
    return not (read & stored or totals & made or writes & (stored | used))


def _joined(first: Stage, second: Stage) -> Stage | None:
    """One stage for both; None where the second needs the first to be through."""
    if [a.size for a in first.inner] != [a.size for a in second.inner]:
        return None
    if first.in_order or second.in_order:
        return None
    renamed: dict[Leaf, Index] = {
        old: Index.of(new) for old, new in zip(second.inner, first.inner, strict=True)
    }
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


def _exact(values: Mapping[Buffer, Expr], load: Load, _: Index) -> Expr | None:
    """The value itself, where reading it back would give the same: not after rounding."""
    value = values.get(load.buffer)
    if value is None or load.buffer.dtype.computed_in is not load.buffer.dtype:
        return None
    return value


# --- buffers that nobody else reads ---


def _localize(
    stages: list[Stage], group: Group, wanted: set[str], sizes: Sizes, limit: int
) -> list[Stage]:
    """Keep what is only read here beside the row, or not at all."""
    read = {load.buffer.name for s in stages for st in s.body for load in loads_of(st.value)}
    local: dict[str, _Local] = {}
    dropped: set[str] = set()
    for member in group.members:
        if member.name in wanted or member.inner:
            continue
        rest = [d for d, axis in enumerate(member.outer) if axis not in group.rows[member.name]]
        width = product([member.size[d] for d in rest])
        if member.name not in read:
            dropped.add(member.name)
        elif sizes.hint(width) * member.buffer.dtype.bytes <= limit:
            buffer = Buffer(f"{member.name}_row", member.buffer.dtype, width, True)
            local[member.name] = _Local(member, buffer, rest)
    return [kept for s in stages if (kept := _with_scratch(s, local, dropped)) is not None]


@dataclass(frozen=True, slots=True)
class _Local:
    """A buffer that lives beside the row."""

    member: Compute
    buffer: Buffer
    dims: list[int]  # those that are not the row's

    def place(self, index: Index) -> Index:
        """Where the element lies that was at `index` of the whole."""
        point = coordinates(index, self.member)
        assert point is not None, "the fuser saw to it"
        return flat([point[d] for d in self.dims], [self.member.size[d] for d in self.dims])


def _with_scratch(stage: Stage, local: Mapping[str, _Local], dropped: set[str]) -> Stage | None:
    def replace(load: Load, index: Index) -> Expr | None:
        own = local.get(load.buffer.name)
        return None if own is None else Load(load.dtype, own.buffer, own.place(index))

    body: list[Statement] = []
    for statement in stage.body:
        value = rewritten(statement.value, replace, {})
        if isinstance(statement, Accumulate):
            body.append(Accumulate(statement.name, statement.combine, value))
        elif (own := local.get(statement.buffer.name)) is not None:
            body.append(Store(own.buffer, own.place(statement.index), value))
        elif statement.buffer.name not in dropped:
            body.append(Store(statement.buffer, statement.index, value))
    return Stage(stage.inner, tuple(body), stage.in_order) if body else None
