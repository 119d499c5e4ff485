"""Which loops run together: greedy, on bytes of memory traffic saved, each refusal with a reason.

A group shares its outer iterations ("rows").  A member joins if its own rows are those of the group
and if all that it reads of the group was written in the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from stator.graph.edit import is_effect
from stator.loops.index import Axis
from stator.loops.values import product
from stator.lower.items import Check, Compute, Extern, Item, Scatter, Size
from stator.lower.sizes import Sizes
from stator.schedule.again import MOST_AGAIN, computed_again
from stator.schedule.rows import Rows, assign
from stator.torch_api import is_mutable_op, is_random_op, is_view_op

WORTH_THREADS: Final = 1 << 15  # points of a loop that are better shared than done in passing
MOST_MEMBERS: Final = 48
# Expressions inside of each other: whoever writes code goes as deep, and Python has 1,000 calls.
DEEPEST: Final = 128
MOST_BUFFERS: Final = 256  # half of what a launch on a GPU hands over: 4 KiB of addresses
MOST_NEIGHBOURS: Final = 4  # groups that are asked, of those that read the same memory
FEW_ROWS: Final = 255  # on a GPU: too few to share a long loop
ACROSS: Final = 64  # there, rows that one program takes where they lie next to each other
FAR: Final = 1  # library calls between two loops, beyond which a result would wait too long


@dataclass(eq=False)
class Group:
    """Loops with common outer iterations, in order; or one item that runs alone."""

    members: list[Compute] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)  # of members, in what they read of others
    alone: Scatter | Check | Size | Extern | None = None

    @property
    def leads(self) -> bool:
        """Whether some member reduces or scans."""
        return any(member.leads for member in self.members)

    def add(self, member: Compute, rows: Rows) -> None:
        """Take in a loop, and the rows that all have then."""
        self.members.append(member)
        self.rows = rows
        # What a reduction or a scan found is at hand: it ends what is written inside of each other.
        self.depths[member.name] = 0 if member.leads else self.depth_with(member)

    def depth_with(self, member: Compute) -> int:
        """How deep a loop's expression is, once values stand where it reads other members."""
        read = (self.depths.get(name, 0) for name in member.reads)
        return member.value.depth + max(read, default=0)

    @property
    def reads(self) -> set[str]:
        """Names of all that it needs."""
        if self.alone is not None:
            return self.alone.reads
        return set().union(*(member.reads for member in self.members))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a loop did not join a group.  Text form: `loop with first of the group: reason`."""

    loop: str
    other: str  # the first of the group
    reason: str

    def __str__(self) -> str:
        return f"{self.loop} with {self.other}: {self.reason}"


@dataclass(slots=True)
class Fused:
    """Groups in an order in which they can run, and why others are not one."""

    groups: list[Group]
    refused: list[Refusal]

    @property
    def refusals(self) -> list[str]:
        """The refusals, in words."""
        return [str(refusal) for refusal in self.refused]


def fuse(
    items: Sequence[Item],
    sizes: Sizes,
    results: Collection[str] = (),
    *,
    late: bool = False,
    few_rows: int = 1,
    in_registers: bool = False,
) -> Fused:
    """Group `items`, keeping every reader behind what it reads.

    `late`: some of them are computed a second time, to be there for short; they shall not be moved
    to the front, unless they are among `results`, which are kept in any case.  A loop that is worth
    it does not join a group of `few_rows` or less.  `in_registers`: what a member makes is computed
    anew at each place of it that others read.
    """
    return _Fuser(items, sizes, frozenset(results), late, few_rows, in_registers).fuse()


class _Fuser:
    def __init__(
        self,
        items: Sequence[Item],
        sizes: Sizes,
        results: frozenset[str],
        late: bool,
        few_rows: int,
        in_registers: bool,
    ) -> None:
        self.items = items
        self.sizes = sizes
        self.results = results
        self.late = late
        self.few_rows = few_rows
        self.in_registers = in_registers
        self.groups: list[Group] = []
        self.needs: list[int] = []  # bit sets of groups that each group waits for, all the way
        self.home: dict[str, int] = {}  # name -> group that makes it
        self.readers: dict[str, list[int]] = {}  # name -> groups of loops that read it
        self.refused: list[Refusal] = []
        self.effects: list[int] = []  # the last call with an effect: they keep their order
        self.calls = 0  # of libraries, so far
        self.called: dict[int, int] = {}  # how many there were when a group ran, about

    def fuse(self) -> Fused:
        for item in self.items:
            if isinstance(item, Compute):
                self._place(item)
            else:
                self.calls += isinstance(item, Extern) and not is_view_op(item.node.target)
                self._append(Group(alone=item), self._waits(item), item.name)
        return Fused(self._ordered(), self.refused)

    def _sources(self, item: Item) -> set[int]:
        return {self.home[name] for name in item.reads if name in self.home}

    def _waits(self, item: Scatter | Check | Size | Extern) -> set[int]:
        """What a call comes behind: its sources, effects before it, readers of what it writes."""
        waits = self._sources(item)
        if isinstance(item, Extern):
            target = item.node.target
            if is_effect(item.node) or is_mutable_op(target) or is_random_op(target):
                waits |= set(self.effects)
                self.effects = [len(self.groups)]
            if is_mutable_op(target):
                waits |= set(range(len(self.groups)))
        return waits

    def _append(self, group: Group, sources: set[int], name: str) -> None:
        self.home[name] = len(self.groups)
        self.groups.append(group)
        self.needs.append(self._needed(sources))

    def _needed(self, sources: set[int]) -> int:
        wanted = 0
        for source in sources:
            wanted |= self.needs[source] | (1 << source)
        return wanted

    def _depend(self, group: int, sources: set[int]) -> None:
        """`group` now waits for `sources`, and so does all that waits for `group`."""
        wanted = self._needed(sources - {group})
        if not wanted & ~self.needs[group]:
            return
        for number, needs in enumerate(self.needs):
            if number == group or needs >> group & 1:
                self.needs[number] |= wanted

    def _place(self, item: Compute) -> None:
        sources = self._sources(item)
        for number in sorted(self._candidates(item, sources), key=self._saving(item), reverse=True):
            group = self.groups[number]
            rows, reason = self._rows_with(number, item, sources)
            if rows is None:
                self.refused.append(Refusal(item.name, group.members[0].name, reason))
                continue
            group.add(item, rows)
            self.home[item.name] = number
            if self.calls - self.called[number] <= FAR:
                self.called[number] = self.calls
            self._note_reads(number, item)
            self._depend(number, sources)
            return
        rows, reason = assign([item])
        assert rows is not None, reason
        self.called[len(self.groups)] = self.calls
        group = Group()
        group.add(item, rows)
        self._append(group, sources, item.name)
        self._note_reads(len(self.groups) - 1, item)

    def _note_reads(self, number: int, item: Compute) -> None:
        for name in item.reads:
            known = self.readers.setdefault(name, [])
            if number not in known:
                known.append(number)

    def _candidates(self, item: Compute, sources: set[int]) -> list[int]:
        """Groups that make something it reads, or read the same memory, the earliest first."""
        found = {number for number in sources if self.groups[number].alone is None}
        for name in item.reads:
            found.update(self.readers.get(name, ())[-MOST_NEIGHBOURS:])
        return sorted(found)  # a set's order follows the seed of Python's hashes

    def _saving(self, item: Compute) -> Callable[[int], int]:
        def saved(number: int) -> int:
            made = sum(
                self.sizes.hint(member.total) * member.buffer.dtype.bytes
                for member in self.groups[number].members
                if member.name in item.reads
            )
            return 2 * made + (1 if made == 0 else 0)

        return saved

    def _rows_with(self, number: int, item: Compute, sources: set[int]) -> tuple[Rows | None, str]:
        """Rows of the group with `item` in it; or None and why it cannot join."""
        group = self.groups[number]
        if reason := _why_too_large(group, item) or self._why_too_early(number, item):
            return None, reason
        for source in sources - {number}:
            if self.needs[source] >> number & 1:
                return None, "something between them would have to run in the middle"
        if not (group.leads or item.leads) and item.total is not group.members[0].total:
            others = group.members[0].total
            return None, f"{item.total} points against {others}, and no reduction to share rows"
        rows, reason = assign([*group.members, item])
        if rows is None or reason:
            return None, reason
        if self._is_too_much(rows, [*group.members, item]):
            return None, "too few rows for threads to share"
        if self.in_registers and computed_again(item, group.members) > MOST_AGAIN:
            return None, f"more than {MOST_AGAIN} operations would be done again, at other places"
        return rows, ""

    def _why_too_early(self, number: int, item: Compute) -> str:
        """Why `item` shall not run with a group that comes long before it; "" if it may."""
        between = self.calls - self.called[number]
        if not self.late or between <= FAR or item.name in self.results:
            return ""
        return f"{between} calls stand between: what it makes would wait in memory"

    def _is_too_much(self, rows: Rows, members: list[Compute]) -> bool:
        """Whether too few rows would hold a loop that is worth several threads."""
        count = self.sizes.hint(product([axis.size for axis in rows[members[0].name]]))
        others = [m for m in members if not m.leads and self.sizes.hint(m.total) >= WORTH_THREADS]
        if self.few_rows > 1 and any(_lies_across(m, rows[m.name]) for m in others):
            count //= ACROSS
        return bool(others) and count <= self.few_rows

    def _ordered(self) -> list[Group]:
        """Groups so that each stands behind those it waits for; else in the order they began."""
        order: list[Group] = []
        ready: list[int] = []
        watching: dict[int, list[int]] = {}  # by one of the groups that they wait for
        done = 0

        def look(number: int) -> None:
            left = self.needs[number] & ~done
            if left:
                watching.setdefault(left.bit_length() - 1, []).append(number)
            else:
                heappush(ready, number)

        for number in range(len(self.groups)):
            look(number)
        while ready:
            number = heappop(ready)
            order.append(self.groups[number])
            done |= 1 << number
            for other in watching.pop(number, ()):
                look(other)
        assert not watching, "groups wait for each other"
        return order


def _why_too_large(group: Group, item: Compute) -> str:
    """Why a kernel of the group does not take in one more loop; "" if it may."""
    if len(group.members) >= MOST_MEMBERS:
        return f"{MOST_MEMBERS} loops are enough for one kernel"
    depth = group.depth_with(item)
    if depth > DEEPEST:
        return f"{depth} operations would stand inside of each other: {DEEPEST} are enough"
    made = {member.name for member in group.members}
    buffers = len(made | group.reads | item.reads) + 1
    if buffers > MOST_BUFFERS:
        return f"it would handle {buffers} tensors: {MOST_BUFFERS} are enough for one kernel"
    return ""


def _lies_across(member: Compute, rows: Sequence[Axis]) -> bool:
    """Whether rows of a loop lie closer in memory than the elements of one."""
    long = [axis for axis in rows if axis.size.constant != 1]
    rest = any(axis not in rows and axis.size.constant != 1 for axis in member.outer)
    return bool(long) and rest and member.stride[member.outer.index(long[-1])].constant == 1
