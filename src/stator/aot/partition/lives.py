"""What is in memory while a half of a step runs: from which place, and from when to when.

Between two calls of libraries, all kernels count as one.  What it alone makes and reads is nowhere,
unless it reads that again along rows that are too long to lie beside it.  What it is the last to
read, it stores over: a result of the same size lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from stator.aot.partition.scratch import Calling, highest

ARENA, POOL, TORCH = range(3)


@dataclass(frozen=True, slots=True)
class Fact:
    """What every cut asks of a node."""

    number: int
    base: int  # the node whose memory it is
    reads: tuple[int, ...]  # such nodes
    value: int  # its bytes
    bytes: int  # of memory of its own; 0: none
    large: bool  # too much for an arena
    brief: bool  # only kernels make and read it
    is_call: bool  # of a library
    stores_over: bool  # a kernel that may write where it reads
    by_torch: bool  # a library makes the memory
    reduced: list[int] = field(default_factory=list)  # kernels that read it more than once
    far: list[int] = field(default_factory=list)  # such whose rows are too long to lie beside them
    part_of: int | None = None  # the call that makes it, with other results


class Span(NamedTuple):
    """Memory of a value, while a half runs."""

    node: int
    place: int
    bytes: int
    first: int
    end: int  # the first step that it is not there any more


class Half(NamedTuple):
    """A forward or a backward, foreseen."""

    spans: list[Span]
    steps: int
    calls: Mapping[int, Calling] = {}  # by step: those that may take memory for themselves

    def held(self) -> list[list[int]]:
        """Bytes of each place, step by step."""
        changes = [[0] * (self.steps + 2) for _ in (ARENA, POOL, TORCH)]
        for _, place, size, first, end in self.spans:
            changes[place][first] += size
            changes[place][end] -= size
        return [list(accumulate(one)) for one in changes]

    def most(self) -> list[int]:
        """The most bytes of each place; of torch's, with what calls take for themselves."""
        arena, pool, torchs = self.held()
        return [max(arena), max(pool), highest(torchs, self.calls)]

    def at_most(self, place: int) -> list[Span]:
        """What is alive then."""
        held = self.held()[place]
        when = held.index(max(held))
        return [one for one in self.spans if one.place == place and one.first <= when < one.end]


@dataclass(slots=True)
class Lives:
    """A half that runs nodes by their numbers; a first run of two is `len(facts)` above."""

    facts: Sequence[Fact]  # by number
    runs: Sequence[int]
    held_by_others: Collection[int]  # never stored over
    at: list[Fact] = field(init=False)  # by step
    calls: list[int] = field(init=False)  # of libraries, up to a step
    last: dict[int, int] = field(init=False)  # the last step that reads the value of a run
    when: dict[int, int] = field(default_factory=dict)  # the step of a run, once it is asked for
    inherited: dict[int, int] = field(default_factory=dict)  # by step: whose place it stores into

    def __post_init__(self) -> None:
        count = len(self.facts)
        self.at = [self.facts[run - count if run >= count else run] for run in self.runs]
        self.calls = [*accumulate([fact.is_call for fact in self.at]), len(self.runs) + 1]

    def spans(
        self,
        given: Collection[int],
        wanted: Iterable[int],
        owned: Mapping[int, int] | None = None,
    ) -> list[Span]:
        """What is in memory; `wanted` outlive the half, `owned` die in it, `given` is not asked."""
        self.last = self._last_reads(wanted)
        spans = [
            self._span(self.facts[number], place, (0, self.last.get(number, 0)))
            for number, place in (owned or {}).items()
        ]
        for step, (run, fact) in enumerate(zip(self.runs, self.at, strict=True)):
            if not fact.bytes or run in given or (fact.brief and self._is_nowhere(step)):
                continue
            end = self.last.get(run, step)
            home = self.inherited.get(step)
            if home is None:
                home = _home(fact, end == len(self.runs))
            first = step if fact.part_of is None else self._made(step)
            spans.append(self._span(fact, home, (first, end)))
        return spans

    def _made(self, step: int) -> int:
        """When a part of a result comes to memory: with the whole."""
        whole = self.at[step].part_of
        while step and self.at[step].number != whole:
            step -= 1
        return step

    def _last_reads(self, wanted: Iterable[int]) -> dict[int, int]:
        """By value: the last step that reads it; that of a first run is another value."""
        count = len(self.facts)
        last: dict[int, int] = {}
        latest: dict[int, int] = {}  # what ran twice, by what is there
        if max(self.runs, default=0) < count:  # nothing did
            for step, fact in enumerate(self.at):
                for memory in fact.reads:
                    last[memory] = step
            return last | dict.fromkeys(wanted, len(self.runs))
        for step, (run, fact) in enumerate(zip(self.runs, self.at, strict=True)):
            if run >= count:
                latest[run - count] = run
            elif run in latest:
                latest[run] = run
            for memory in fact.reads:
                last[latest.get(memory, memory)] = step
        for memory in wanted:
            last[latest.get(memory, memory)] = len(self.runs)
        return last

    def _span(self, fact: Fact, home: int, life: tuple[int, int]) -> Span:
        """What a value takes, until a kernel that is the last to read it stores over it."""
        size = fact.bytes or fact.value
        first, end = life
        if end == len(self.runs) or self.at[end].is_call or fact.number in self.held_by_others:
            return Span(fact.number, home, size, first, end + 1)
        over = self._through(end, size)
        if over < len(self.runs):
            made = self._in_kernel(over, self.at[over].reduced)  # of what is read a second time
            for writer in (*self._reading(over, fact.number), *made):
                if self._may_write(writer, size):
                    self.inherited[writer] = home
                    return Span(fact.number, home, size, first, writer)
        return Span(fact.number, home, size, first, self._through(end) + 1)

    def _through(self, step: int, size: int | None = None) -> int:
        """Where what is made of a value by step `step` gets to memory; each as large as `size`."""
        while step < len(self.runs) and size in (None, self.at[step].bytes):
            then = self.last.get(self.runs[step], step)
            if then == step or not self._is_nowhere(step):
                break
            if size is not None and not self.at[step].stores_over:
                break
            step = then
        return step

    def _is_nowhere(self, step: int) -> bool:
        """Whether only the kernel that makes a value reads it."""
        if not self.at[step].brief:
            return False
        is_alone = self.calls[self.last.get(self.runs[step], step)] == self.calls[step]
        return is_alone and not self._in_kernel(step, self.at[step].far)

    def _in_kernel(self, step: int, readers: Collection[int]) -> list[int]:
        """Where the kernel that makes a value runs some of its readers."""
        if not readers:
            return []
        if not self.when:
            self.when = {run: step for step, run in enumerate(self.runs)}
        when, calls, behind = self.when, self.calls, len(self.runs)
        twin = len(self.facts) if self.runs[step] >= len(self.facts) else 0
        here = calls[step]
        return [
            other for number in readers if calls[other := when.get(number + twin, behind)] == here
        ]

    def _reading(self, step: int, number: int) -> list[int]:
        """Where the kernel that reads a value last does so, the first step first."""
        found = [step]
        while step and self.calls[step - 1] == self.calls[step]:
            step -= 1
            if number in self.at[step].reads:
                found.append(step)
        return found[::-1]

    def _may_write(self, step: int, size: int) -> bool:
        fact = self.at[step]
        fits = fact.stores_over and fact.bytes == size and step not in self.inherited
        return fits and not self._is_nowhere(step)


def _home(fact: Fact, outlives: bool) -> int:
    """Where the memory of a new value comes from."""
    if fact.by_torch:
        return TORCH
    return POOL if outlives or fact.large else ARENA
