"""How long values live in an order of tasks, and an order in which fewer bytes live at once.

Tasks are numbers in an order that works.  Nothing here knows of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate


@dataclass(slots=True)
class Value:
    """Bytes that lie in memory from the task that makes them to the last that reads them."""

    bytes: int
    maker: int | None  # None: it is there from the start
    readers: set[int] = field(default_factory=set)
    stays: bool = False  # for whoever asked for it: no reader is the last


def peak_bytes(order: Sequence[int], values: Sequence[Value]) -> int:
    """Bytes that live at most, if tasks run in this order."""
    place = {task: number for number, task in enumerate(order)}
    changes = [0] * (len(order) + 2)
    for value in values:
        first = 0 if value.maker is None else place[value.maker]
        last = max((place[task] for task in value.readers), default=first)
        changes[first] += value.bytes
        changes[len(order) + 1 if value.stays else last + 1] -= value.bytes
    return max(accumulate(changes))


def frugal_order(waits: Sequence[set[int]], values: Sequence[Value]) -> list[int]:
    """Tasks behind those they wait for; of several that could run, the one that frees most.

    List scheduling: a task counts what it makes less what dies with it, and the first of equals
    runs.  It takes n log n steps, for n tasks and what they read.
    """
    return _List(waits, values).run()


class _List:
    def __init__(self, waits: Sequence[set[int]], values: Sequence[Value]) -> None:
        count = len(waits)
        self.made = [0] * count
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.values = values
        self.left = [set(value.readers) for value in values]  # readers that have not run
        self.missing = [len(tasks) for tasks in waits]
        self.waiting: list[list[int]] = [[] for _ in range(count)]
        for task, needed in enumerate(waits):
            for other in needed:
                self.waiting[other].append(task)
        for number, value in enumerate(values):
            if value.maker is not None:
                self.made[value.maker] += value.bytes
            for task in value.readers:
                self.reads[task].append(number)

    def run(self) -> list[int]:
        order: dict[int, None] = {}
        ready = [self._rank(task) for task, missing in enumerate(self.missing) if not missing]
        heapify(ready)
        while ready:
            _, task = heappop(ready)
            if task in order:
                continue  # it has risen since
            order[task] = None
            for rank in self._after(task):
                heappush(ready, rank)
        assert len(order) == len(self.missing), "tasks wait for each other"
        return list(order)

    def _after(self, task: int) -> Iterator[tuple[int, int]]:
        """Tasks that can run now that this one has, or that rank higher."""
        for number in self.reads[task]:
            left = self.left[number]
            left.discard(task)
            if len(left) == 1:
                yield from (self._rank(other) for other in left if not self.missing[other])
        for other in self.waiting[task]:
            self.missing[other] -= 1
            if not self.missing[other]:
                yield self._rank(other)

    def _rank(self, task: int) -> tuple[int, int]:
        """What memory grows by if the task runs now; then its place."""
        dying = sum(
            self.values[number].bytes
            for number in self.reads[task]
            if len(self.left[number]) == 1 and not self.values[number].stays
        )
        return self.made[task] - dying, task
