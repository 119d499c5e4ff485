"""Where buffers live: at offsets of one arena, planned from their lifetimes, or in the pool.

A buffer that nobody outside of the call sees gets a place in the arena.  Buffers whose lifetimes do
not meet share places.  Known sizes are fitted like an allocator would, ahead of time, or the
largest first, where that takes less; a size known at run time alone shares a place with equal ones.
What the caller gets, and what a call might keep, is a tensor of its own.  So is a large buffer: an
arena is there for a whole call, and what it holds at one time it could not lend to outputs and
saved values at another.

On a GPU torch's allocator is the pool, and the arena is a tensor that it makes for the call: memory
that is given again is given in the order of the stream.
"""

from __future__ import annotations

import operator
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import fx

from stator.aot.partition.scratch import Calling, highest
from stator.core.events import Held, Home, is_large
from stator.loops.index import Index
from stator.lower.sizes import evaluate
from stator.runtime.plan import Allocation, Call, Free, Launch, Plan, Step, Together, View
from stator.torch_api import OpOverload, keeps_nothing, returns_alias

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector
GPU_ALIGNMENT: Final = 512  # what torch's allocator for GPUs counts in
# Bytes, as in memory.ll:
POOLED: Final = 1 << 16  # from here on tensors are rooms of the pool, and torch's below
LINE: Final = 64
OWN_LINES: Final = 5  # of a room: its header, and some that set tensors apart


Span = tuple[int, int, int]  # bytes, and the first and the last step that they are there


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena of one plan."""

    offsets: Mapping[str, Index]  # by buffer, in bytes
    arena: Index  # bytes in all


def plan_memory(plan: Plan) -> Memory:
    """Offsets for all buffers that live inside of a call."""
    inside, unit = _stays_inside(plan), alignment(plan.device)
    hint = partial(evaluate, known=plan.hints)
    known, varying = _Fitted(), _Slots()
    homes: dict[str, tuple[_Fitted | _Slots, Index]] = {}
    places: dict[str, int] = {}
    for step in plan.steps:
        for made in allocations(step):
            size = rounded_bytes(made, unit)
            if made.name in inside and not is_large(hint(size), plan.on_gpu):
                home = known if size.constant is not None else varying
                homes[made.name] = (home, size)
                places[made.name] = home.take(size)
        if isinstance(step, Free):
            for name in step.names:
                if name in homes:
                    home, size = homes[name]
                    home.give(places[name], size)
    spans = _spans(plan, {name for name, (home, _) in homes.items() if home is known})
    if known.end > _most(plan, spans.values()):  # there are holes at the peak
        places |= place_largest_first(spans, known.end) or {}
    end = max((places[name] + size for name, (size, _, _) in spans.items()), default=0)
    starts = varying.starts(Index.of(end))
    offsets = {
        name: Index.of(places[name]) if home is known else starts[places[name]]
        for name, (home, _) in homes.items()
    }
    return Memory(offsets, starts[-1])


def _spans(plan: Plan, names: Collection[str]) -> dict[str, Span]:
    """Bytes and lives of buffers whose sizes are known."""
    last, unit = _ends(plan, {}), alignment(plan.device)
    return {
        made.name: (rounded_bytes(made, unit).constant or 0, number, last[made.name])
        for number, step in enumerate(plan.steps)
        for made in allocations(step)
        if made.name in names
    }


def place_largest_first(spans: Mapping[str, Span], end: int) -> dict[str, int] | None:
    """Each buffer at the lowest place that is free all its life; None if one reaches `end`.

    Large ones find their places before small ones have cut the room into pieces.
    """
    order = sorted(spans.items(), key=lambda item: (-item[1][0], item[1][1]))
    placed: list[tuple[int, int, int, int]] = []  # start, end, first and last step
    found: dict[str, int] = {}
    for name, (size, first, last) in order:
        place = 0
        for start, stop, begins, ends in placed:
            if begins <= last and first <= ends and stop > place:
                if start - place >= size:
                    break
                place = stop
        if place + size >= end:
            return None
        found[name] = place
        if size:
            insort(placed, (place, place + size, first, last))
    return found


@dataclass(frozen=True, slots=True)
class Own:
    """Memory of inputs that nobody but the call holds."""

    names: tuple[str, ...]  # of the inputs: it is there as long as one of them
    bytes: int
    by_torch: bool  # else it is the pool's


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer or a tensor, from the step that makes it to the one behind which it is gone."""

    name: str
    bytes: int
    first: int
    last: int
    offset: Index | None  # in the arena; None: it is a tensor of its own
    by_torch: bool = False  # a library call made it, it is too small for the pool, or on a GPU


def owners(plan: Plan) -> dict[str, str]:
    """For what lies in the memory of something else: the name under which that was made."""
    found: dict[str, str] = {}
    parts: dict[tuple[str, Any], str] = {}
    for step in plan.steps:
        source: str | None = None
        if isinstance(step, View):
            source = step.source
        elif isinstance(step, Call) and step.args and isinstance(step.args[0], fx.Node):
            whole = step.args[0].name
            if step.target is operator.getitem:
                first = parts.setdefault((whole, step.args[1]), step.name)
                source = found.get(whole, first if first != step.name else None)
            elif isinstance(step.target, OpOverload) and returns_alias(step.target):
                source = whole
        if source is not None:
            found[step.makes[0]] = found.get(source, source)
    return found


def lifetimes(plan: Plan, memory: Memory) -> list[Lifetime]:
    """What a call makes, in order, with the sizes that the plan was made for.

    Parts of a result that has several live as long as they are read, not as the whole is.
    """
    hint = partial(evaluate, known=plan.hints)
    others, unit = owners(plan), alignment(plan.device)
    made: dict[str, tuple[int, int]] = {}
    pooled: set[str] = set()
    for number, step in enumerate(plan.steps):
        for room in allocations(step):
            size = hint(rounded_bytes(room, unit))
            if room.name not in memory.offsets and size >= POOLED and not plan.on_gpu:
                size = room_bytes(size)
                pooled.add(room.name)
            made[room.name] = (size, number)
        if not isinstance(step, Call) or step.out is not None or step.name in others:
            continue
        if step.bytes is not None:
            size, first = hint(step.bytes), number
            if step.target is operator.getitem and step.takes[0] in made:
                rest, first = made[step.takes[0]]
                made[step.takes[0]] = (rest - size, first)
            made[step.name] = (size, first)
    last = _ends(plan, others)
    return [
        Lifetime(
            name,
            size,
            first,
            last[name],
            memory.offsets.get(name),
            by_torch=name not in pooled and name not in memory.offsets,
        )
        for name, (size, first) in made.items()
    ]


def _ends(plan: Plan, others: Mapping[str, str]) -> dict[str, int]:
    """For what owns memory: the step behind which nobody has a name for it."""
    freed = {
        name: number
        for number, step in enumerate(plan.steps)
        if isinstance(step, Free)
        for name in step.names
    }
    last: dict[str, int] = {}
    for name in (*plan.inputs, *(name for step in plan.steps for name in step.makes)):
        owner = others.get(name, name)
        last[owner] = max(last.get(owner, 0), freed.get(name, len(plan.steps)))
    return last


def predicted(plan: Plan, memory: Memory, own: Iterable[Own] = ()) -> Held:
    """Bytes that a call holds at most beyond what its caller holds.

    `own` are inputs that the caller has let go of: they die in the call.
    """
    lives = [life for life in lifetimes(plan, memory) if life.offset is None]
    spans = [(life.by_torch, life.bytes, life.first, life.last) for life in lives]
    ends = _ends(plan, owners(plan))
    for given in own:
        last = max(ends[name] for name in given.names)
        spans.append((given.by_torch, given.bytes, 0, last))
    pool, by_torch = (
        _held(plan, [span[1:] for span in spans if span[0] is torchs]) for torchs in (False, True)
    )
    return Held(arena_bytes(plan, memory), max(pool), highest(by_torch, _asking(plan)))


def _asking(plan: Plan) -> dict[int, Calling]:
    """Calls that may take memory for themselves, by their step."""
    calls = {
        number: Calling(step.target, step.args, step.kwargs)
        for number, step in enumerate(plan.steps)
        if isinstance(step, Call) and step.out is None and not plan.on_gpu
    }
    return {number: calling for number, calling in calls.items() if calling.most}


def room_bytes(size: int) -> int:
    """Bytes of the pool's room for a tensor: whole lines of the cache, and some of its own."""
    return -(-size // LINE) * LINE + OWN_LINES * LINE


def homes(plan: Plan, memory: Memory, names: Sequence[str]) -> dict[str, Home]:
    """Where the last outputs lie, by `names` that others have for them; unless that is unknown."""
    others = owners(plan)
    returned = [
        others.get(value.name, value.name) if isinstance(value, fx.Node) else ""
        for value in plan.outputs
    ]
    first = len(returned) - len(names)
    lives = {life.name: life for life in lifetimes(plan, memory)}
    callers = {*plan.inputs, *returned[:first]}
    found: dict[str, Home] = {}
    for name, owner in zip(names, returned[first:], strict=True):
        if owner in callers:
            found[name] = Home(owner, 0, by_torch=False)
        elif owner in lives:
            found[name] = Home(owner, lives[owner].bytes, lives[owner].by_torch)
    return found


def home_of_one(name: str, size: int, by_torch: bool) -> Home:
    """The memory of a tensor alone, of which nothing but its bytes is known and who made it."""
    if by_torch or size < POOLED:
        return Home(name, size, by_torch=True)
    return Home(name, room_bytes(size), by_torch=False)


def _most(plan: Plan, spans: Iterable[Sequence[int]]) -> int:
    """The most bytes at once of what lives from one step to another."""
    return max(_held(plan, spans))


def _held(plan: Plan, spans: Iterable[Sequence[int]]) -> list[int]:
    """Bytes at once, step by step."""
    changes = [0] * (len(plan.steps) + 2)
    for size, first, last in spans:
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes))


def arena_bytes(plan: Plan, memory: Memory) -> int:
    """Bytes of the arena, with the sizes that the plan was made for."""
    return evaluate(memory.arena, plan.hints)


def memory_text(plan: Plan, memory: Memory) -> str:
    """Every buffer with its size, place and lifetime, for people."""
    rows = [
        f"  {life.name}: {life.bytes} bytes, steps {life.first} to {life.last}, "
        + ("its own" if life.offset is None else f"arena at {life.offset}")
        for life in lifetimes(plan, memory)
    ]
    peak = predicted(plan, memory).all
    return "\n".join((f"memory: arena of {memory.arena} bytes, peak {peak}", *rows))


def allocations(step: Step) -> Iterator[Allocation]:
    """What a step makes room for before it runs."""
    match step:
        case Launch():
            yield from step.allocations
        case Together():
            for launch in step.launches:
                yield from launch.allocations
        case Call(out=Allocation() as made):
            yield made


def alignment(device: torch.device) -> int:
    """Bytes that places in an arena are multiples of."""
    return ALIGNMENT if device.type == "cpu" else GPU_ALIGNMENT


def rounded_bytes(made: Allocation, unit: int = ALIGNMENT) -> Index:
    """Bytes of a buffer, in whole units of the alignment."""
    size: Index = made.elements * int(made.dtype.itemsize)
    if size.constant is not None:
        size = Index.of(max(size.constant, 0))
    return (size + (unit - 1)) // unit * unit


def _stays_inside(plan: Plan) -> set[str]:
    """Buffers that no output is or might share memory with."""
    made = {made.name for step in plan.steps for made in allocations(step) if made.is_dense}
    seen: set[str] = set()  # outside
    fx.map_arg(plan.outputs, lambda node: seen.add(node.name))
    for step in plan.steps:
        if isinstance(step, Call) and not keeps_nothing(step.target):
            seen.update(step.takes)
    for step in reversed(plan.steps):
        if isinstance(step, View) and step.made.name in seen:
            seen.add(step.source)
    return made - seen - plan.relays


@dataclass(slots=True)
class _Fitted:
    """Places for known sizes: each goes into the smallest hole that holds it."""

    end: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)  # start and size, in order

    def take(self, size: Index) -> int:
        wanted = size.constant or 0
        fitting = [hole for hole in self.holes if hole[1] >= wanted]
        if fitting:
            start, length = min(fitting, key=lambda hole: hole[1])
            self.holes.remove((start, length))
            if length > wanted:
                insort(self.holes, (start + wanted, length - wanted))
            return start
        start = self.end
        if self.holes and sum(self.holes[-1]) == self.end:  # the last hole grows
            start = self.holes.pop()[0]
        self.end = start + wanted
        return start

    def give(self, start: int, size: Index) -> None:
        length = size.constant or 0
        if not length:
            return
        for hole in [hole for hole in self.holes if start in (sum(hole), hole[0] - length)]:
            self.holes.remove(hole)
            start, length = min(start, hole[0]), length + hole[1]
        insort(self.holes, (start, length))


@dataclass(slots=True)
class _Slots:
    """Places for sizes known at run time: one is taken again by a buffer of the same size."""

    sizes: list[Index] = field(default_factory=list)
    idle: dict[Index, list[int]] = field(default_factory=dict)

    def take(self, size: Index) -> int:
        if self.idle.get(size):
            return self.idle[size].pop()
        self.sizes.append(size)
        return len(self.sizes) - 1

    def give(self, slot: int, size: Index) -> None:
        self.idle.setdefault(size, []).append(slot)

    def starts(self, first: Index) -> list[Index]:
        """Where each begins, and where the last ends."""
        found = [first]
        for size in self.sizes:
            found.append(found[-1] + size)
        return found
