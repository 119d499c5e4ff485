"""Calls of a compiled graph, recorded on a GPU once and replayed: `Options.cuda_graphs`.

A recording does to the same memory what it did when it was made.  So arguments have to lie where
they lay then; those that do not are copied there.  Results lie where they lay, too: what the caller
gets is copied out, and what a forward keeps for its backward stays, in a pool that the recordings
of a program share.

What lies in the pool is good until something else is replayed there.  While anybody holds what a
forward kept, nothing but its backward is replayed: other calls run as usual.

    call 1 of a size   runs as usual, and shows where arguments lie
    call 2             is recorded, and replayed
    further calls      are replayed; if an argument that stayed where it was lies elsewhere, another
                       recording is made, for which it is copied

A backward has recordings of its own for each of its forward's: what it reads lies elsewhere there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stator.core.logs import logger
from stator.core.torch_types import Boxed
from stator.runtime.making import making
from stator.torch_api import copy_all, is_dense, is_sole, keeps_graph, storage_holders

log: Final = logger("recordings")

MOST_SIZES: Final = 8  # recordings of one graph; calls with further sizes run as usual
MOST_AGAIN: Final = 4  # recordings of one size

Numbers: TypeAlias = int | float | bool | str | None


class Recorder(Protocol):
    """What records on a device."""

    lock: Any  # a context: one call at a time uses memory that recordings share

    def new_pool(self) -> Any:
        """Memory that recordings share."""
        ...

    def is_recording(self) -> bool:
        """Whether somebody records what is done now."""
        ...

    def order(self) -> Any:
        """Let what is done now wait for what was replayed before; the stream that does it.

        The same object, as long as it is the same stream.
        """
        ...

    def record(
        self, pool: Any, run: Boxed, arguments: list[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a call, without doing it; a function that does it, and the results.

        Neither arguments nor results are held.
        """
        ...


@dataclass(frozen=True, slots=True)
class Recordable:
    """A graph on a GPU as its calls see it: places are those of inputs and results."""

    device: torch.device
    reason: str | None = None  # why its calls cannot be recorded
    shaped: tuple[int, ...] = ()  # inputs that are numbers, or whose sizes are symbols
    saved: tuple[int, ...] = ()  # inputs that the forward returned for the backward alone
    written: tuple[int, ...] = ()  # inputs of the caller's that it writes to
    overwrites: tuple[int, ...] = ()  # saved inputs that it stores over
    kept: tuple[int, ...] = ()  # results that are for the backward alone


class NotRecorded(RuntimeError):  # noqa: N818  says what it is
    """A call that cannot be recorded; the message says why."""


def with_cuda_graphs(run: Boxed, facts: Recordable, pool: Pool, name: str) -> Boxed:
    """`run`, recorded and replayed where that can be; `pool` has a note if not, and why.

    What `run` stores over is seen to here: nobody needs to give it copies.
    """
    if facts.reason is not None:
        pool.note(f"{name}: calls are not recorded: {facts.reason}")
    return Replayed(run, facts, pool, name)


@dataclass(eq=False)
class Pool:
    """Memory that the recordings of a program share, and who needs what lies there."""

    recorder: Recorder
    notes: list[str] = field(default_factory=list)  # of the compilation's record
    memory: Any = None
    keeper: Recording | None = None  # whose results may be needed still
    recorded: int = 0
    replayed: int = 0

    def handle(self) -> Any:
        """The memory, asked for when it is first needed."""
        if self.memory is None:
            self.memory = self.recorder.new_pool()
        return self.memory

    def pending(self) -> Recording | None:
        """The recording whose last results somebody holds."""
        if self.keeper is not None and not self.keeper.is_held():
            self.keeper = None
        return self.keeper

    def note(self, text: str) -> None:
        """Say something once, to the record and in the log."""
        if text not in self.notes:
            self.notes.append(text)
            log.debug("%s", text)


# --- results ---


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tensor lies in the memory of another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from its first element

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number, or None."""

    value: Any

    def of(self, arguments: list[Any], copies: list[Tensor], earlier: list[Any]) -> Any:
        """What a call returns."""
        return self.value


@dataclass(frozen=True, slots=True)
class Same:
    """The same object as an earlier result."""

    place: int

    def of(self, arguments: list[Any], copies: list[Tensor], earlier: list[Any]) -> Any:
        """What a call returns."""
        return earlier[self.place]


@dataclass(frozen=True, slots=True)
class Given:
    """An argument, or a view of it."""

    place: int
    shape: Shape | None

    def of(self, arguments: list[Any], copies: list[Tensor], earlier: list[Any]) -> Any:
        """What a call returns."""
        argument = arguments[self.place]
        return argument if self.shape is None else self.shape.of(argument)


@dataclass(frozen=True, slots=True)
class Copied:
    """What the caller gets: a copy of what lies in the pool."""

    place: int  # among those that are copied

    def of(self, arguments: list[Any], copies: list[Tensor], earlier: list[Any]) -> Any:
        """What a call returns."""
        return copies[self.place]


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """What lies in the pool until the backward has read it."""

    kept: list[Tensor]
    place: int

    def of(self, arguments: list[Any], copies: list[Tensor], earlier: list[Any]) -> Any:
        """What a call returns."""
        return self.kept[self.place]


Result: TypeAlias = Fixed | Same | Given | Copied | Stays


@dataclass(frozen=True, slots=True, eq=False)
class Out:
    """What lies in the pool and is copied for the caller: all of it at once."""

    tensors: list[Tensor]
    dense: list[bool]  # which of them have no gaps, nor overlaps

    @staticmethod
    def of(tensors: list[Tensor]) -> Out:
        """All of them."""
        return Out(tensors, [is_dense(tensor) for tensor in tensors])

    def copied(self) -> list[Tensor]:
        """Copies in memory of their own, which lie as the originals do."""
        pairs = list(zip(self.tensors, self.dense, strict=True))
        copies = [torch.empty_like(one) if dense else with_gaps(one) for one, dense in pairs]
        if targets := list(compress(copies, self.dense)):
            copy_all(targets, list(compress(self.tensors, self.dense)))
        return copies


def with_gaps(tensor: Tensor) -> Tensor:
    """A copy with the same gaps, and what lies there."""
    return flat(tensor).clone().as_strided(tensor.size(), tensor.stride(), 0)


def flat(tensor: Tensor) -> Tensor:
    """All memory from the first to the last element, gaps included."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


# --- recordings ---


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Where an argument is copied to before a replay."""

    place: int
    tensor: Tensor
    stride: tuple[int, ...] | None  # that the argument has to have: there are gaps, or overlaps
    is_returned: bool  # the graph writes to it

    def fill(self, argument: Tensor) -> None:
        """Copy an argument in."""
        if self.stride is None:
            self.tensor.copy_(argument, non_blocking=True)
        else:
            flat(self.tensor).copy_(flat(argument), non_blocking=True)

    def give_back(self, argument: Tensor) -> None:
        """Copy what was written to the caller's."""
        if self.stride is None:
            argument.copy_(self.tensor, non_blocking=True)
        else:
            flat(argument).copy_(flat(self.tensor), non_blocking=True)


@cache
def _references_at_rest() -> tuple[int, int]:
    """References to a tensor and to its storage that only a list has each: torch has some, too."""
    tensors = [torch.empty(1, device="cpu")]
    storages = [tensors[0].untyped_storage()]
    return sys.getrefcount(tensors[0]), sys.getrefcount(storages[0])


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory of tensors, each once, and how many of ours look at it."""

    storages: list[Any]
    holders: list[int]

    @staticmethod
    def of(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Memory:
        """That of `tensors`; `others` are ours, too."""
        found = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors)}
        places = [one.untyped_storage().data_ptr() for one in (*tensors, *others)]
        holders = [places.count(address) + 1 for address in found]  # with the list
        return Memory(list(found.values()), holders)

    def is_held(self, address: int | None = None) -> bool:
        """Whether more look at it, or somebody has it itself; at an address, or anywhere."""
        storages, holders, alone = self.storages, self.holders, _references_at_rest()[1]
        return any(
            sys.getrefcount(storages[i]) > alone or storage_holders(storages[i]) > holders[i]
            for i in range(len(storages))
            if address is None or storages[i].data_ptr() == address
        )


@dataclass(eq=False)
class Recording:
    """One recorded call: where its arguments lay, and what its results are."""

    replay: Callable[[], None]
    in_place: tuple[int, ...]  # places of arguments that have to lie where they lay
    addresses: list[int]  # of those
    buffers: tuple[Buffer, ...]
    results: list[Result]
    out: Out
    kept: list[Tensor]
    kept_addresses: frozenset[int]  # of all that is for the backward
    memory: Memory = field(init=False)  # of what is kept
    stream: Any = None  # where it was replayed

    def __post_init__(self) -> None:
        others = [buffer.tensor for buffer in self.buffers]
        self.memory = Memory.of(self.kept, [*others, *self.out.tensors])
        if self.is_held():
            raise NotRecorded("somebody else holds what is kept for the backward")

    def is_held(self) -> bool:
        """Whether anybody holds what is kept, or looks at its memory."""
        kept, alone = self.kept, _references_at_rest()[0]
        for i in range(len(kept)):
            if sys.getrefcount(kept[i]) > alone or kept[i]._use_count() > 1:
                return True
        return self.memory.is_held()

    def is_sole(self, arguments: list[Any], place: int) -> bool:
        """Whether nobody but the arguments has a value that is kept."""
        alone = _references_at_rest()[0] + 1  # by the arguments
        if sys.getrefcount(arguments[place]) > alone or arguments[place]._use_count() > 1:
            return False
        return not self.memory.is_held(arguments[place].untyped_storage().data_ptr())

    def has(self, values: Iterable[Any]) -> bool:
        """Whether all of these are what was kept."""
        known = self.kept_addresses
        return all(isinstance(value, Tensor) and value.data_ptr() in known for value in values)

    def elsewhere(self, arguments: Sequence[Any]) -> list[int]:
        """Places of arguments that do not lie where they lay."""
        found = [arguments[place].data_ptr() for place in self.in_place]
        if found == self.addresses:
            return []
        pairs = zip(self.in_place, found, self.addresses, strict=True)
        return [place for place, now, then in pairs if now != then]

    def takes(self, arguments: Sequence[Any]) -> bool:
        """Whether arguments can be copied to where they are read."""
        return all(
            buffer.stride is None or arguments[buffer.place].stride() == buffer.stride
            for buffer in self.buffers
        )

    def play(self, arguments: list[Any], stream: Any) -> tuple[Any, ...]:
        """Do again what was recorded, with other arguments."""
        if stream is not self.stream:
            for buffer in self.buffers:  # not given back before this stream is through with them
                buffer.tensor.record_stream(stream)
            self.stream = stream
        for buffer in self.buffers:
            buffer.fill(arguments[buffer.place])
        self.replay()
        for buffer in self.buffers:
            if buffer.is_returned:
                buffer.give_back(arguments[buffer.place])
        copies, returned = self.out.copied(), list[Any]()
        for result in self.results:
            returned.append(result.of(arguments, copies, returned))
        arguments.clear()
        return tuple(returned)


def _recorded(
    run: Boxed, facts: Recordable, pool: Pool, arguments: Sequence[Any], in_place: tuple[int, ...]
) -> Recording:
    """Record a call; arguments that are not `in_place` get buffers."""
    tensors = [place for place, value in enumerate(arguments) if isinstance(value, Tensor)]
    for place in tensors:
        if arguments[place].device != facts.device:
            raise NotRecorded(f"an argument lies on {arguments[place].device}")
    with torch.inference_mode(False):
        buffers = tuple(
            _buffer(place, arguments[place], place in facts.written)
            for place in tensors
            if place not in in_place
        )
    static = list(arguments)
    for buffer in buffers:
        static[buffer.place] = buffer.tensor
    replay, raw = pool.recorder.record(pool.handle(), run, list(static))
    results, out, kept = _sorted(list(raw), static, facts, in_place)
    addresses = frozenset(raw[i].data_ptr() for i in facts.kept if isinstance(raw[i], Tensor))
    del raw
    where = [arguments[place].data_ptr() for place in in_place]
    return Recording(replay, in_place, where, buffers, results, out, kept, addresses)


def _buffer(place: int, argument: Tensor, is_returned: bool) -> Buffer:
    if is_dense(argument):
        room = torch.empty_strided(
            argument.size(), argument.stride(), dtype=argument.dtype, device=argument.device
        )
        return Buffer(place, room, None, is_returned)
    room = torch.empty_like(flat(argument)).as_strided(argument.size(), argument.stride(), 0)
    return Buffer(place, room, tuple(argument.stride()), is_returned)


def _sorted(
    raw: list[Any], static: list[Any], facts: Recordable, in_place: tuple[int, ...]
) -> tuple[list[Result], Out, list[Tensor]]:
    """What each result is, what is copied, and what stays."""
    memory = {
        value.untyped_storage().data_ptr(): place
        for place, value in enumerate(static)
        if isinstance(value, Tensor) and value.numel()
    }
    results: list[Result] = []
    kept: list[Tensor] = []
    copied: list[Tensor] = []
    for place, value in enumerate(raw):
        if not isinstance(value, Tensor):
            results.append(Fixed(value))
            continue
        if value.device != facts.device:
            raise NotRecorded(f"a result lies on {value.device}")
        first = next(i for i, other in enumerate(raw) if other is value)
        source = memory.get(value.untyped_storage().data_ptr()) if value.numel() else None
        stays = place in facts.kept
        if first < place and (first in facts.kept) == stays:
            results.append(Same(first))
        elif source is not None and (not stays or source in in_place):
            results.append(_given(source, value, static[source]))
        elif stays:
            results.append(Stays(kept, len(kept)))
            kept.append(value)
        else:
            results.append(Copied(len(copied)))
            copied.append(value.detach())  # it may be kept, too: of that nobody has the object
    return results, Out.of(copied), kept


def _given(place: int, value: Tensor, argument: Tensor) -> Given:
    """A result that lies in an argument's memory."""
    if value is argument:
        return Given(place, None)
    offset = value.storage_offset() - argument.storage_offset()
    if value.dtype is not argument.dtype:
        raise NotRecorded("a result is an argument's memory in another type")
    return Given(place, Shape(tuple(value.size()), tuple(value.stride()), offset))


# --- calls ---


@dataclass(slots=True)
class Size:
    """Calls with arguments of one size."""

    seen: list[int | None]  # where arguments of the first call lay; empty before
    moving: set[int] = field(default_factory=set)  # places of those that do not stay
    recording: Recording | None = None
    count: int = 0  # recordings that were made


@dataclass(eq=False)
class Replayed:
    """A compiled graph whose calls are recorded and replayed."""

    run: Boxed
    facts: Recordable
    pool: Pool
    name: str
    sizes: WeakKeyDictionary[Any, dict[Any, Size]] = field(default_factory=WeakKeyDictionary)
    is_plain: bool = field(init=False)  # from now on, calls run as usual

    def __post_init__(self) -> None:
        self.is_plain = self.facts.reason is not None

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self.facts.overwrites:
            self._spare(arguments)
        recorder = self.pool.recorder
        if self.is_plain or making.is_mine() or recorder.is_recording():
            return self.run(arguments)
        with recorder.lock:
            recording = self._ready(arguments)
            if recording is not None:
                stream = recorder.order()
                if recording.kept:
                    self.pool.keeper = recording
                self.pool.replayed += 1
                return recording.play(arguments, stream)
        return self.run(arguments)

    def _spare(self, arguments: list[Any]) -> None:
        """Copies in the place of values that would be stored over, and somebody needs still."""
        keeper, is_kept = self.pool.keeper, keeps_graph()
        for place in self.facts.overwrites:
            own = keeper is not None and keeper.has([arguments[place]])
            sole = keeper.is_sole if own and keeper is not None else is_sole
            if is_kept or not sole(arguments, place):
                arguments[place] = arguments[place].clone()

    def _ready(self, arguments: list[Any]) -> Recording | None:
        """The recording to be replayed with these arguments; None: the call runs as usual."""
        if not self._may_replay(arguments):
            return None
        size = self._size_of(arguments)
        if size is None:
            return None
        if not size.seen:
            size.seen = [_address(value) for value in arguments] or [None]
            return None
        if size.recording is None:
            return self._record(size, arguments)
        moved = size.recording.elsewhere(arguments)
        if moved:
            log.debug("%s: arguments %s lie elsewhere", self.name, moved)
            size.moving |= {*moved} - {*self.facts.saved}
            return self._record(size, arguments)
        return size.recording if size.recording.takes(arguments) else None

    def _may_replay(self, arguments: list[Any]) -> bool:
        """Whether nobody needs what a replay would destroy."""
        pending = self.pool.pending()
        if self.facts.saved:  # of a plain forward there is nothing in the pool
            saved = (arguments[place] for place in self.facts.saved)
            return pending is not None and pending.has(saved)
        if pending is not None:
            self.pool.note(
                f"{self.name}: calls run as usual while the backward of an earlier one is to come"
            )
        return pending is None

    def _size_of(self, arguments: list[Any]) -> Size | None:
        key = tuple(_described(arguments[place]) for place in self.facts.shaped)
        behind = self.pool.keeper if self.facts.saved else self  # the forward's recording
        sizes = self.sizes.setdefault(behind, {})
        size = sizes.get(key)
        if size is None and len(sizes) >= MOST_SIZES:
            self.pool.note(f"{self.name}: only calls of the first {MOST_SIZES} sizes are recorded")
        elif size is None:
            size = sizes[key] = Size([])
        return size

    def _record(self, size: Size, arguments: list[Any]) -> Recording | None:
        """Record a call, if that was not done too often."""
        size.recording = None
        if size.count >= MOST_AGAIN:
            self._give_up("arguments lie elsewhere again and again")
            return None
        size.count += 1
        stays = [
            place
            for place, value in enumerate(arguments)
            if isinstance(value, Tensor)
            and place not in size.moving
            and (place in self.facts.saved or value.data_ptr() == size.seen[place])
        ]
        try:
            size.recording = _recorded(self.run, self.facts, self.pool, arguments, tuple(stays))
        except RuntimeError as error:
            self._give_up(str(error))
            return None
        self.pool.recorded += 1
        return size.recording

    def _give_up(self, reason: str) -> None:
        self.is_plain = True
        self.sizes.clear()
        self.pool.note(f"{self.name}: calls are not recorded any more: {reason}")


def _address(value: Any) -> int | None:
    return value.data_ptr() if isinstance(value, Tensor) else None


def _described(value: Any) -> Any:
    """What a recording depends on, of an argument whose size may change."""
    if isinstance(value, Tensor):
        return value.size(), value.stride()
    return type(value), value  # 1, 1.0 and True are equal
