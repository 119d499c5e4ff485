"""Kernels for a GPU: what a member of a group makes and another reads stays in registers.

No member reads from memory what another one of its kernel wrote: the value itself takes the place
of the load.  Where a block holds a whole row it is computed once; where it does not, again.
"""

from __future__ import annotations

from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Combine,
    Expr,
    Kernel,
    Load,
    Stage,
    Store,
    Within,
    walk,
)
from stator.lower.items import Compute, Scatter
from stator.lower.sizes import Sizes
from stator.schedule.build import in_memory_order, merged_stages, place_of_rows
from stator.schedule.coalesce import coalesce
from stator.schedule.fuse import Group
from stator.schedule.idle_roundings import without_idle_roundings
from stator.schedule.rewrite import rewritten
from stator.schedule.rows import coordinates, position, row_number
from stator.schedule.single_term import single_term


def build_gpu_kernel(name: str, group: Group, wanted: set[str], sizes: Sizes) -> Kernel:
    """The kernel of `group`; buffers in `wanted` are read outside of it."""
    if isinstance(group.alone, Scatter):  # its iterations may meet: the hardware combines them
        store = Store(group.alone.buffer, group.alone.index, group.alone.value, group.alone.combine)
        return without_idle_roundings(Kernel(name, group.alone.axes, (Stage((), (store,)),)))
    leader = next((m for m in group.members if m.leads), group.members[0])
    own = group.rows[leader.name]
    outer = tuple(Axis(f"i{d}", axis.size) for d, axis in enumerate(own))
    builder = _Builder(group, row_number(outer))
    stages: list[Stage] = []
    for number, member in enumerate(group.members):
        stages += builder.stages(number, member, kept=member.name in wanted)
    kernel = coalesce(in_memory_order(Kernel(name, outer, tuple(merged_stages(stages))), sizes))
    # again: axes that became one may be those of another stage (test_registers.py)
    kernel = Kernel(name, kernel.outer, tuple(merged_stages(list(kernel.stages))))
    return without_idle_roundings(kernel)


class _Builder:
    """Stages of a group's members, in order."""

    def __init__(self, group: Group, row: Index) -> None:
        self.rows = group.rows
        self.row = row
        self.members = {member.name: member for member in group.members}
        self.values: dict[str, Expr] = {}  # of members, over their own axes
        self.totals: dict[str, Expr] = {}  # what there is one of in a row: what reductions found
        choices = (isinstance(part, Within) for m in group.members for part in walk(m.value))
        self.has_choices = group.leads and any(choices)

    def stages(self, number: int, member: Compute, *, kept: bool) -> list[Stage]:
        """Those of one member; none if nobody outside reads what it makes, and it reduces not."""
        value = rewritten(member.value, self._instead_of, {})
        own = self.rows[member.name]
        place = place_of_rows(own, self.row)
        rest = member.inner or tuple(axis for axis in member.outer if axis not in own)
        inner = tuple(Axis(f"r{number}_{d}", axis.size) for d, axis in enumerate(rest))
        place |= {old: position(new) for old, new in zip(rest, inner, strict=True)}
        inner = tuple(axis for axis in inner if axis.size.constant != 1)
        placed, index = value.replaced(place), member.store.replaced(place)
        total = Accumulated(value.dtype, f"acc_{number}")
        if member.combine is None and self.has_choices and not inner:
            # Settled here: each choice would compute it anew, under its own condition.
            self.totals[member.name] = total
            stages = [Stage((), (Accumulate(total.name, Combine.MAX, placed),))]
            return [*stages, Stage((), (Store(member.buffer, index, total),))] if kept else stages
        if member.combine is None:
            self.values[member.name] = value
            return [Stage(inner, (Store(member.buffer, index, placed),))] if kept else []
        accumulate = Accumulate(total.name, member.combine, placed)
        if member.scan is not None:
            running = Store(member.buffer, index, total)
            return [Stage(inner, (accumulate, running), in_order=True)]
        term = single_term(member.combine, placed, inner)
        self.totals[member.name] = found = total if term is None else term
        stages = [Stage(inner, (accumulate,))] if term is None else []
        if kept:
            at = member.store.replaced(place_of_rows(own, self.row))
            stages.append(Stage((), (Store(member.buffer, at, found),)))
        return stages

    def _instead_of(self, load: Load, index: Index) -> Expr | None:
        """The value that a load of another member's result would find, unrounded: see half.py."""
        name = load.buffer.name
        if name in self.totals:
            return self.totals[name]
        if name not in self.values:
            return None  # from outside, or of a scan: that one is in memory
        maker = self.members[name]
        point = coordinates(index, maker)
        assert point is not None, "the fuser saw to it"
        place: dict[Leaf, Index] = dict(zip(maker.outer, point, strict=True))
        return self.values[name].replaced(place)
