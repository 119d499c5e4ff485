"""Programs that read constants made of weights: made at the first call, and when weights change.

A weight has changed when it lies elsewhere, when its version counter moved, or when a few words of
it differ: a write through `weight.data` moves no counter.  Words on a GPU are not looked at, which
would make every call wait for it.  A frozen program keeps what it has, and says once that the
weights went on without it: it looks at some of them at each call, in turn.

What was made is shared by all programs that would make the same of the same weights.  It is never
written to: new constants take the place of the old ones at once, and a call that is under way goes
on with those it began with.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from threading import Lock
from typing import Any, Final

from torch import Tensor

from stator.core.events import Held
from stator.core.torch_types import Boxed
from stator.graph.recipe import Constants, Recipe
from stator.runtime.discarded import discard, is_discarded
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
    return Program(run, constants) if constants.recipes else run


@dataclass(frozen=True, slots=True)
class Part:
    """A few weights as they were when something was made of them; they are not kept alive."""

    begin: int  # the number of the first
    places: tuple[int, ...]
    versions: tuple[int, ...]
    pieces: Any  # addresses and lengths for the sampler, of those in the CPU's memory
    sample: int

    @staticmethod
    def of(weights: Sequence[Tensor], begin: int) -> Part:
        """As they are now."""
        own = weights[begin : begin + PART]
        near = [weight for weight in own if weight.device.type == "cpu"]
        places = [number for weight in near for number in (weight.data_ptr(), _words(weight))]
        pieces = (ctypes.c_int64 * len(places))(*places)
        return Part(begin, _places(own), _versions(own), pieces, _sampled(pieces))

    def is_now(self, weights: Sequence[Tensor]) -> bool:
        """Whether these among `weights` lie where they lay, and are unchanged."""
        own = weights[self.begin : self.begin + PART]
        if _places(own) != self.places or _versions(own) != self.versions:
            return False
        return _sampled(self.pieces) == self.sample


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


def _words(weight: Tensor) -> int:
    """How many words lie behind its first element: all of it, if it has no gaps."""
    room = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.itemsize
    return int(min(room, weight.nbytes)) // WORD


def _sampled(pieces: Any) -> int:
    if not len(pieces):
        return 0
    if not _sampler and (found := sampler()) is not None:
        _sampler.append(found)
    return int(_sampler[0](pieces, len(pieces) // 2)) if _sampler else 0


_sampler: Final[list[Any]] = []  # at most one


@dataclass(eq=False)
class Made:
    """A constant, and how the weights were that it was made of."""

    tensor: Tensor
    state: State


_shelf: Final[weakref.WeakValueDictionary[Any, Made]] = weakref.WeakValueDictionary()
_lock: Final = Lock()
_programs: Final[weakref.WeakSet[Program]] = weakref.WeakSet()  # those that are frozen


def sets_of(weights: Iterable[Tensor]) -> list[Set]:
    """Sets of constants of frozen programs that were made of any of these."""
    wanted = {id(weight) for weight in weights}
    return [
        one
        for program in list(_programs)
        for key, one in list(program.sets.items())
        if not wanted.isdisjoint(key)
    ]


def made(recipe: Recipe, weights: Sequence[Tensor]) -> Made:
    """The constant; the same one for all who ask for the same."""
    key = (recipe.text, *(id(weight) for weight in weights))
    with _lock:
        known = _shelf.get(key)
        if known is not None and (any(map(is_discarded, weights)) or known.state.is_now(weights)):
            return known
        fresh = _shelf[key] = Made(recipe.make(weights), State.of(weights))
        return fresh


@dataclass(eq=False)
class Set:
    """The constants of a program for one set of weights: modules of one class share programs."""

    constants: Constants
    inputs: tuple[int, ...]
    weights: tuple[weakref.ref[Tensor], ...]
    state: State | None = None
    made: tuple[Made, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    has_warned: bool = False
    turn: int = 0  # counts the calls of a frozen program, which look at one part after another
    is_updating: bool = False  # somebody is about to give it the weights that it sees

    def check(self, weights: Sequence[Tensor]) -> None:
        """See whether weights have changed; then what was made of them is made again, or not.

        A frozen program, which has nothing more at stake than a warning, looks at a part at each
        call, in turn: all weights of a large model, cold as they are, took a sixtieth of its time.
        """
        state = self.state
        if state is None:
            return
        if not self.constants.frozen:
            if not state.is_now(weights):
                self.follow(weights)
            return
        if self.has_warned or not state.parts:
            return
        part = state.parts[self.turn % len(state.parts)]
        self.turn += 1
        if not (part.is_now(weights) or self.is_updating or self.state is not state):
            self.has_warned = True
            warnings.warn(
                "a weight was changed after the program that reads it was frozen, which goes on "
                "with the old one; stator.update_weights gives it the new one",
                stacklevel=3,
            )

    def follow_given(self, given: Mapping[int, Tensor]) -> None:
        """Make the constants anew, with other values for some weights, by the weights' ids."""
        weights = [weight for ref in self.weights if (weight := ref()) is not None]
        if len(weights) == len(self.weights):
            self.follow(weights, given)

    def follow(self, weights: Sequence[Tensor], given: Mapping[int, Tensor] | None = None) -> None:
        """Make the constants anew, of `weights`; some are `given` in place of those.

        What depends on none of the latter stays as it is.
        """
        values = [(given or {}).get(id(weight), weight) for weight in weights]
        by_position = dict(zip(self.inputs, values, strict=True))
        taken = {i for i, w in zip(self.inputs, weights, strict=True) if id(w) in (given or {})}
        fresh = []
        for number, recipe in enumerate(self.constants.recipes):
            if given is None or not self.made or not taken.isdisjoint(recipe.weights):
                fresh.append(made(recipe, [by_position[index] for index in recipe.weights]))
            else:
                fresh.append(self.made[number])
        self.state = None if self.constants.discards else State.of(weights)
        self.made, self.tensors = tuple(fresh), tuple(one.tensor for one in fresh)

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
        if found is None:
            found = self._furnish(weights)
        else:
            found.check(weights)
        given = [arguments[index] for index in self.constants.arguments]
        given += found.tensors
        arguments.clear()
        return self.run(given)

    def _furnish(self, weights: Sequence[Tensor]) -> Set:
        """Constants for weights that were not seen before; they go with the first of these."""
        key, sets = tuple(map(id, weights)), self.sets

        def forget(_: object) -> None:
            sets.pop(key, None)

        refs = tuple(weakref.ref(weight, forget) for weight in weights)
        found = Set(self.constants, self.inputs, refs)
        found.follow(weights)
        if self.constants.discards:
            found.discard(weights)
        return sets.setdefault(key, found)
