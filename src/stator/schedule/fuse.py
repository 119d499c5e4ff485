"""Which loops run together: greedy, on bytes of memory traffic saved, each refusal with a reason.

A group shares its outer iterations ("rows").  A member joins if its own rows are those of the group
and if all that it reads of the group was written in the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from stator.graph.edit import is_effect
from stator.loops.index import Axis, Index
from stator.loops.ir import loads_of
from stator.loops.values import flat
from stator.lower.items import Compute, Extern
from stator.torch_api import is_mutable_op, is_random_op

MOST_MEMBERS: Final = 48


@dataclass(eq=False)
class Group:
    """Loops with common outer iterations, in order; or one call of torch's, alone."""

    rows: int
    members: list[Compute] = field(default_factory=list)
    extern: Extern | None = None

    @property
    def reduces(self) -> bool:
        """Whether some member reduces."""
        return any(member.inner for member in self.members)


@dataclass(slots=True)
class Fused:
    """Groups in an order in which they can run, and why others are not one."""

    groups: list[Group]
    refusals: list[str]


def fuse(items: Sequence[Compute | Extern]) -> Fused:
    """Group `items`, keeping every reader behind what it reads."""
    return _Fuser(items).fuse()


class _Fuser:
    def __init__(self, items: Sequence[Compute | Extern]) -> None:
        self.items = items
        self.groups: list[Group] = []
        self.needs: list[int] = []  # bit sets of groups that each group waits for, all the way
        self.home: dict[str, int] = {}  # name -> group that makes it
        self.producers: dict[str, Compute] = {}
        self.refusals: list[str] = []
        self.effects: list[int] = []  # the last call with an effect: they keep their order

    def fuse(self) -> Fused:
        for item in self.items:
            if isinstance(item, Compute):
                self._place(item)
            else:
                self._append(Group(1, [], item), self._waits(item), item.node.name)
        return Fused(self._ordered(), self.refusals)

    def _sources(self, item: Compute | Extern) -> set[int]:
        if isinstance(item, Compute):
            names = item.reads
        else:
            names = {source.name for source in item.node.all_input_nodes}
        return {self.home[name] for name in names if name in self.home}

    def _waits(self, item: Extern) -> set[int]:
        """What a call comes behind: its sources, effects before it, readers of what it writes."""
        waits = self._sources(item)
        node = item.node
        if is_effect(node) or is_mutable_op(node.target) or is_random_op(node.target):
            waits |= set(self.effects)
            self.effects = [len(self.groups)]
        if is_mutable_op(node.target):
            waits |= set(range(len(self.groups)))
        return waits

    def _append(self, group: Group, sources: set[int], name: str) -> None:
        self.home[name] = len(self.groups)
        self.groups.append(group)
        self.needs.append(0)
        self._depend(len(self.groups) - 1, sources)

    def _depend(self, group: int, sources: set[int]) -> None:
        """`group` now waits for `sources`, and so does all that waits for `group`."""
        wanted = 0
        for source in sources - {group}:
            wanted |= self.needs[source] | (1 << source)
        for number, needs in enumerate(self.needs):
            if number == group or needs >> group & 1:
                self.needs[number] |= wanted

    def _place(self, item: Compute) -> None:
        sources = self._sources(item)
        for number in sorted(self._candidates(item, sources), key=self._saving(item), reverse=True):
            group = self.groups[number]
            reason = self._why_not_join(number, item, sources)
            if reason is not None:
                first = group.members[0].name if group.members else "a call"
                self.refusals.append(f"{item.name} with {first}: {reason}")
                continue
            group.rows = min(group.rows, item.total)
            group.members.append(item)
            self.home[item.name] = number
            self.producers[item.name] = item
            self._depend(number, sources)
            return
        self.producers[item.name] = item
        self._append(Group(item.total, [item]), sources, item.name)

    def _candidates(self, item: Compute, sources: set[int]) -> set[int]:
        """Groups that make something it reads, or read the same memory."""
        found = {number for number in sources if self.groups[number].extern is None}
        reads = item.reads
        for number, group in enumerate(self.groups[-8:], max(len(self.groups) - 8, 0)):
            if group.extern is None and any(reads & member.reads for member in group.members):
                found.add(number)
        return found

    def _saving(self, item: Compute) -> Callable[[int], int]:
        def saved(number: int) -> int:
            made = sum(
                member.total * member.buffer.dtype.bytes
                for member in self.groups[number].members
                if member.name in item.reads
            )
            return 2 * made + (1 if made == 0 else 0)

        return saved

    def _why_not_join(self, number: int, item: Compute, sources: set[int]) -> str | None:
        group = self.groups[number]
        if len(group.members) >= MOST_MEMBERS:
            return f"{MOST_MEMBERS} loops are enough for one kernel"
        for source in sources - {number}:
            if self.needs[source] >> number & 1:
                return "something between them would have to run in the middle"
        if not (group.reduces or item.inner) and item.total != group.rows:
            return f"{item.total} points against {group.rows}, and no reduction to share rows with"
        return self._why_not_rows(group, item)

    def _why_not_rows(self, group: Group, item: Compute) -> str | None:
        rows = min(group.rows, item.total)
        for member in (*group.members, item):
            if row_dims(member, rows) is None:
                return f"{member.name} does not fall into {rows} rows"
        inside = {member.name for member in group.members}
        for member in (*group.members, item):
            for name in member.reads & (inside | {item.name}):
                if reason := self._why_other_row(member, name, rows):
                    return reason
        return None

    def _why_other_row(self, reader: Compute, name: str, rows: int) -> str | None:
        writer = self.producers[name]
        if not writer.is_contiguous:
            return f"{name} does not lie in rows"
        width = writer.total // rows
        count = row_dims(reader, rows)
        assert count is not None, "checked before"
        axes = reader.outer[:count]
        row = flat([_place(axis) for axis in axes], [axis.size for axis in axes])
        for load in loads_of(reader.value):
            if load.buffer.name == name and (load.index // width) is not row:
                return f"{reader.name} reads {name} in another row than it is written in"
        return None

    def _ordered(self) -> list[Group]:
        """Groups so that each stands behind those it waits for; else in the order they began."""
        order: list[Group] = []
        done = 0
        waiting = list(range(len(self.groups)))
        while waiting:
            ready = [n for n in waiting if self.needs[n] & ~done == 0]
            assert ready, "groups wait for each other"
            for number in ready:
                order.append(self.groups[number])
                done |= 1 << number
            waiting = [n for n in waiting if not done >> n & 1]
        return order


def _place(axis: Axis) -> Index:
    return Index.of(axis) if axis.size.constant != 1 else Index.of(0)


def row_dims(member: Compute, rows: int) -> int | None:
    """How many leading dimensions make up the rows; None if there is no such number."""
    if member.inner:
        return len(member.size) if member.total == rows else None
    for count in range(len(member.size), -1, -1):
        if prod(member.size[:count]) == rows:
            return count
    return None
