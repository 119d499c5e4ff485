"""Programs that read constants made of weights: made at the first call, and when weights change.

A weight has changed when it lies elsewhere, when its version counter moved, or when a few words of
it differ: a write through `weight.data` moves no counter.  Words on a GPU are not looked at, which
would make every call wait for it.  A frozen program keeps what it has, and says once that the
weights went on without it: it looks at some of them at each call, in turn.

What was made is shared by all programs that would make the same of the same weights.  It is never
written to: new constants take the place of the old ones at once, and a call that is under way goes
on with those it began with.

While a CUDA graph is recorded nothing is done yet: what would be made then is not there before a
replay.  It is not kept.  Every replay makes it anew, unless it was there before.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import Any, Final

from torch import Tensor

from stator.core.events import Held
from stator.core.torch_types import Boxed
from stator.graph.recipe import Constants, Recipe
from stator.runtime.cuda_recorder import is_recorded
from stator.runtime.discarded import check_alive, discard, is_discarded
from stator.runtime.making import making
from stator.runtime.native.image import Image, load_image
from stator.runtime.native.prelude import sampler
from stator.runtime.recorded import Recorded, Recordings

WORD: Final = 8  # bytes
PART: Final = 32  # as many weights are looked at together

_version: Final = attrgetter("_version")
_place: Final = methodcaller("data_ptr")


@dataclass(frozen=True, slots=True)
class Furnished:
    """A compiled graph with its constants, as data."""

    image: Image | Recorded
    constants: Constants

    @property
    def held(self) -> Held:
        """Bytes that a call was foreseen to hold."""
        return self.image.held


def load_program(image: Image | Recorded | Furnished, label: str, recordings: Recordings) -> Boxed:
    """A compiled graph as a Python function."""
    if isinstance(image, Furnished):
        return with_constants(load_program(image.image, label, recordings), image.constants)
    if isinstance(image, Recorded):
        return recordings.of(load_image(image.image, label), image.facts, label)
    return load_image(image, label)


def with_constants(run: Boxed, constants: Constants) -> Boxed:
    """`run`, with constants behind its arguments."""
    return Program(run, constants) if constants.are_needed else run


@dataclass(frozen=True, slots=True)
class Part:
    """A few weights as they were when something was made of them; they are not kept alive."""

    begin: int  # the number of the first
    places: tuple[int, ...]
    versions: tuple[int, ...]
    pieces: Any  # addresses and lengths for the sampler, of those in the CPU's memory
    short: tuple[tuple[int, int], ...]  # the same in bytes, of those that hold no word
    sample: tuple[int | bytes, ...]

    @staticmethod
    def of(weights: Sequence[Tensor], begin: int) -> Part:
        """As they are now."""
        own = weights[begin : begin + PART]
        near = [weight for weight in own if weight.device.type == "cpu"]
        rooms = [(weight.data_ptr(), _bytes(weight)) for weight in near]
        places = [number for place, size in rooms for number in (place, size // WORD)]
        pieces = (ctypes.c_int64 * len(places))(*places)
        short = tuple(room for room in rooms if 0 < room[1] < WORD)
        return Part(begin, _places(own), _versions(own), pieces, short, _sampled(pieces, short))

    def is_now(self, weights: Sequence[Tensor]) -> bool:
        """Whether these among `weights` lie where they lay, and are unchanged."""
        own = weights[self.begin : self.begin + PART]
        if _places(own) != self.places or _versions(own) != self.versions:
            return False
        return _sampled(self.pieces, self.short) == self.sample


@dataclass(frozen=True, slots=True)
class State:
    """All weights that something was made of, as they were then."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(weights: Sequence[Tensor]) -> State:
        """As they are now."""
        return State(tuple(Part.of(weights, n) for n in range(0, len(weights), PART)))

    def is_now(self, weights: Sequence[Tensor]) -> bool:
        """Whether `weights` lie where these lay, and are unchanged."""
        return all(part.is_now(weights) for part in self.parts)


def _places(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(_place, weights))


def _versions(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(map(_version, weights))


def _memory(weight: Tensor) -> Any:
    """What lives as long as the weight: torch swaps no tensor that somebody refers to weakly."""
    return weight.untyped_storage()


def _are_recorded(weights: Sequence[Tensor]) -> bool:
    """Whether what is done with weights now goes into a CUDA graph."""
    device = weights[0].device if weights else None
    return device is not None and device.type == "cuda" and is_recorded(device)


def _layouts(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((weight.size(), weight.stride(), weight.dtype) for weight in weights)


def _bytes(weight: Tensor) -> int:
    """How many lie behind its first element: all of it, if it has no gaps."""
    room = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.itemsize
    return int(min(room, weight.nbytes))


def _sampled(pieces: Any, short: Iterable[tuple[int, int]]) -> tuple[int | bytes, ...]:
    if not len(pieces):
        return ()
    if not _sampler and (found := sampler()) is not None:
        _sampler.append(found)
    mixed = int(_sampler[0](pieces, len(pieces) // 2)) if _sampler else 0
    return (mixed, *(ctypes.string_at(*piece) for piece in short))


_sampler: Final[list[Any]] = []  # at most one


@dataclass(eq=False)
class Made:
    """A constant, and how the weights were that it was made of."""

    tensor: Tensor
    state: State
    layouts: tuple[Any, ...]  # a program is compiled for one of each, so that it looks at none

    @staticmethod
    def of(recipe: Recipe, weights: Sequence[Tensor]) -> Made:
        """Made now."""
        state = State.of(weights)  # before: a write meanwhile is a change since
        return Made(recipe.make(weights), state, _layouts(weights))

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether another program would make the same of `weights` now."""
        return self.layouts == _layouts(weights) and self.state.is_now(weights)


@dataclass(frozen=True, slots=True)
class Kept:
    """The constants of a set: replaced as a whole, for calls read them without the lock."""

    state: State | None  # of all weights, before anything was made of them; None: not looked at
    made: tuple[Made, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(state: State | None, made: Iterable[Made]) -> Kept:
        """These constants."""
        made = tuple(made)
        return Kept(state, made, tuple(one.tensor for one in made))


_shelf: Final[weakref.WeakValueDictionary[Any, Made]] = weakref.WeakValueDictionary()
_programs: Final[weakref.WeakSet[Program]] = weakref.WeakSet()  # those that are frozen


def _key(recipe: Recipe, weights: Sequence[Tensor]) -> tuple[Any, ...]:
    return (recipe.text, *map(id, weights))


def made(recipe: Recipe, weights: Sequence[Tensor]) -> Made:
    """The constant; the same one for all who ask for the same.  Asked under the lock."""
    key = _key(recipe, weights)
    known = _shelf.get(key)
    if known is not None and (any(map(is_discarded, weights)) or known.is_of(weights)):
        return known
    fresh = _shelf[key] = Made.of(recipe, weights)
    return fresh


def sets_of(weights: Iterable[Tensor]) -> list[Set]:
    """Sets of constants of frozen programs that were made of any of these."""
    wanted = {id(weight) for weight in weights}
    return [
        one
        for program in list(_programs)
        for key, one in list(program.sets.items())
        if not wanted.isdisjoint(key)
    ]


def remake(sets: Iterable[Set], given: Mapping[int, Tensor]) -> None:
    """Make constants anew, with values `given` for some weights, by the weights' ids.

    The shelf is not asked: whoever gives a weight means it, whatever a few words of it look like.
    Until all is made, nothing has changed.
    """
    anew: dict[Any, Made] = {}
    kept = [(one, one.remade(given, anew)) for one in sets]
    _shelf.update(anew)
    for one, constants in kept:
        if constants is not None:
            one.now, one.has_warned = constants, False


@dataclass(eq=False)
class Set:
    """The constants of a program for one set of weights: modules of one class share programs."""

    constants: Constants
    inputs: tuple[int, ...]
    weights: tuple[weakref.ref[Any], ...]  # if not frozen: to their memory, see `_memory`
    now: Kept = Kept(None, (), ())
    has_warned: bool = False
    turn: int = 0  # counts the calls of a frozen program, which look at one part after another
    recorded: list[Kept] = field(default_factory=list)  # which CUDA graphs read

    def check(self, weights: Sequence[Tensor]) -> None:
        """See whether weights have changed; then what was made of them is made again, or not.

        A frozen program, which has nothing more at stake than a warning, looks at a part at each
        call, in turn: all weights of a large model, cold as they are, took a sixtieth of its time.
        """
        now = self.now
        state = now.state
        if state is None:
            return
        if not self.constants.frozen:
            if not state.is_now(weights):
                with making:
                    self.follow(weights)
            return
        if self.has_warned or not state.parts:
            return
        part = state.parts[self.turn % len(state.parts)]
        self.turn += 1
        if not part.is_now(weights) and self._is_left_behind(now):
            self.has_warned = True
            warnings.warn(
                "a weight was changed after the program that reads it was frozen, which goes on "
                "with what it made of the old one, and reads the new one where it made nothing, if "
                "that was written in place; stator.update_weights gives it the new one everywhere",
                stacklevel=3,
            )

    def _is_left_behind(self, seen: Kept) -> bool:
        """Whether nobody has given it other weights, or is about to."""
        if not making.acquire(blocking=False):
            return False
        try:
            return self.now is seen
        finally:
            making.release()

    def follow(self, weights: Sequence[Tensor]) -> None:
        """Make the constants of `weights`; under the lock."""
        state = None if self.constants.discards else State.of(weights)
        by_position = dict(zip(self.inputs, weights, strict=True))
        self.now = Kept.of(
            state,
            [
                made(recipe, [by_position[index] for index in recipe.weights])
                for recipe in self.constants.recipes
            ],
        )

    def remade(self, given: Mapping[int, Tensor], anew: dict[Any, Made]) -> Kept | None:
        """Constants with other values for some weights; what depends on none of them stays.

        `anew` has what was made so already.  None: some weights have died, and with them the set.
        """
        alive = self._alive()
        if alive is None:
            return None
        state = None if self.constants.discards else State.of(list(alive.values()))
        kept = []
        for recipe, old in zip(self.constants.recipes, self.now.made, strict=True):
            weights = [alive[index] for index in recipe.weights]
            key = _key(recipe, weights)
            if key not in anew and any(id(weight) in given for weight in weights):
                anew[key] = Made.of(recipe, [given.get(id(weight), weight) for weight in weights])
            kept.append(anew.get(key, old))
        return Kept.of(state, kept)

    def missing(self, given: Container[int]) -> list[Tensor]:
        """Discarded weights without which constants of those `given`, by ids, cannot be made."""
        alive = self._alive() or {}
        return [
            weight
            for recipe in self.constants.recipes
            if any(id(alive.get(index)) in given for index in recipe.weights)
            for weight in (alive[index] for index in recipe.weights)
            if is_discarded(weight) and id(weight) not in given
        ]

    def _alive(self) -> dict[int, Tensor] | None:
        """The weights of a frozen program by their positions."""
        weights = [weight for ref in self.weights if (weight := ref()) is not None]
        if len(weights) < len(self.weights):
            return None
        return dict(zip(self.inputs, weights, strict=True))

    def discard(self, weights: Sequence[Tensor]) -> None:
        """Give the memory of weights back that nobody reads any more."""
        for index, weight in zip(self.inputs, weights, strict=True):
            if index not in self.constants.arguments:
                discard(weight)


@dataclass(eq=False)
class Program:
    """A compiled graph that reads constants."""

    run: Boxed
    constants: Constants
    inputs: tuple[int, ...] = field(init=False)  # all weights that recipes take
    sets: dict[tuple[int, ...], Set] = field(default_factory=dict)  # by the ids of the weights

    def __post_init__(self) -> None:
        taken = [index for recipe in self.constants.recipes for index in recipe.weights]
        self.inputs = tuple(dict.fromkeys(taken))
        if self.constants.frozen:
            _programs.add(self)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        weights = [arguments[index] for index in self.inputs]
        found = self.sets.get(tuple(map(id, weights)))
        if _are_recorded(weights):
            tensors = self._for_recording(found, weights)
        elif found is None:
            tensors = self._furnish(weights).now.tensors
        else:
            found.check(weights)
            tensors = found.now.tensors
        given = [arguments[index] for index in self.constants.arguments]
        if self.constants.discards:
            check_alive(given)
        given += tensors
        arguments.clear()
        return self.run(given)

    def _for_recording(self, found: Set | None, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Constants for a call that is only recorded: its replays read them, or make them."""
        if found is not None and self.constants.frozen:
            if found.now not in found.recorded:
                found.recorded.append(found.now)
            return found.now.tensors
        given = dict(zip(self.inputs, weights, strict=True))
        recipes = self.constants.recipes
        return [recipe.make([given[index] for index in recipe.weights]) for recipe in recipes]

    def _furnish(self, weights: Sequence[Tensor]) -> Set:
        """Constants for weights that were not seen before; they go with the first of these."""
        key, sets = tuple(map(id, weights)), self.sets

        def forget(_: object) -> None:
            sets.pop(key, None)

        with making:  # nobody gives weights before the set can be found
            found = sets.get(key)
            if found is None:
                lives = weights if self.constants.frozen else map(_memory, weights)
                refs = tuple(weakref.ref(life, forget) for life in lives)
                found = Set(self.constants, self.inputs, refs)
                found.follow(weights)
                if self.constants.discards:
                    found.discard(weights)
                sets[key] = found
            return found
