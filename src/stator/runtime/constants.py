"""Programs that read constants made of weights: made at the first call, and when weights change.

A weight has changed when it lies elsewhere, when its version counter moved, or when a few words of
it differ: a write through `weight.data` moves no counter.  A frozen program keeps what it has, and
says once that the weights went on without it.

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
from threading import Lock
from typing import Any, Final

from torch import Tensor

from stator.core.torch_types import Boxed
from stator.graph.recipe import Constants, Recipe
from stator.runtime.discarded import discard, is_discarded
from stator.runtime.native.image import Image, load_image
from stator.runtime.native.prelude import sampler

WORD: Final = 8  # bytes


@dataclass(frozen=True, slots=True)
class Furnished:
    """A compiled graph with its constants, as data."""

    image: Image
    constants: Constants

    @property
    def peak(self) -> int:
        """Bytes beyond its inputs that a call was foreseen to hold."""
        return self.image.peak


def load_program(image: Image | Furnished, label: str) -> Boxed:
    """A compiled graph as a Python function."""
    if isinstance(image, Image):
        return load_image(image, label)
    return with_constants(load_image(image.image, label), image.constants)


def with_constants(run: Boxed, constants: Constants) -> Boxed:
    """`run`, with constants behind its arguments."""
    return Program(run, constants) if constants.recipes else run


@dataclass(frozen=True, slots=True)
class State:
    """Weights as they were when something was made of them."""

    weights: tuple[Tensor, ...]
    stamps: tuple[tuple[int, int], ...] = ()
    pieces: Any = ()  # addresses and lengths for the sampler
    sample: int = 0

    @staticmethod
    def of(weights: Sequence[Tensor]) -> State:
        """As they are now."""
        places = [number for weight in weights for number in (weight.data_ptr(), _words(weight))]
        pieces = (ctypes.c_int64 * len(places))(*places)
        return State(tuple(weights), tuple(map(_stamp, weights)), pieces, _sampled(pieces))

    def is_now(self, weights: Sequence[Tensor]) -> bool:
        """Whether `weights` are these, and unchanged."""
        for weight, stamp in zip(weights, self.stamps, strict=True):
            if weight.data_ptr() != stamp[0] or weight._version != stamp[1]:
                return False
        return _sampled(self.pieces) == self.sample


def _words(weight: Tensor) -> int:
    """How many words lie behind its first element: all of it, if it has no gaps."""
    room = weight.untyped_storage().nbytes() - weight.storage_offset() * weight.itemsize
    return int(min(room, weight.nbytes)) // WORD


def _stamp(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _sampled(pieces: Any) -> int:
    if not _sampler and (found := sampler()) is not None:
        _sampler.append(found)
    return int(_sampler[0](pieces, len(pieces) // 2)) if _sampler else 0


_sampler: Final[list[Any]] = []  # at most one


@dataclass(eq=False)
class Made:
    """A constant, and the weights that it was made of."""

    tensor: Tensor
    state: State


_shelf: Final[weakref.WeakValueDictionary[Any, Made]] = weakref.WeakValueDictionary()
_lock: Final = Lock()
programs: Final[weakref.WeakSet[Program]] = weakref.WeakSet()  # those that are frozen


def programs_of(weights: Iterable[Tensor]) -> list[Program]:
    """Frozen programs that have made something of any of these."""
    wanted = {id(weight) for weight in weights}
    return [
        program
        for program in programs
        if program.state is not None and any(id(w) in wanted for w in program.state.weights)
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
class Program:
    """A compiled graph that reads constants."""

    run: Boxed
    constants: Constants
    inputs: tuple[int, ...] = field(init=False)  # all weights that recipes take
    state: State | None = None
    made: tuple[Made, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    has_warned: bool = False
    is_updating: bool = False  # somebody is about to give it the weights that it sees

    def __post_init__(self) -> None:
        taken = [index for recipe in self.constants.recipes for index in recipe.weights]
        self.inputs = tuple(dict.fromkeys(taken))
        if self.constants.frozen:
            programs.add(self)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        weights = [arguments[index] for index in self.inputs]
        state = self.state
        if state is None:
            self.follow(weights)
            if self.constants.discards:
                self._discard(weights)
        elif not (self.constants.discards or state.is_now(weights)):
            self._changed(weights, state)
        given = [arguments[index] for index in self.constants.arguments]
        given += self.tensors
        arguments.clear()
        return self.run(given)

    def _changed(self, weights: Sequence[Tensor], state: State) -> None:
        if not self.constants.frozen:
            self.follow(weights)
        elif not (self.has_warned or self.is_updating or self.state is not state):
            self.has_warned = True
            warnings.warn(
                "a weight was changed after the program that reads it was frozen, which goes on "
                "with the old one; stator.update_weights gives it the new one",
                stacklevel=2,
            )

    def follow(self, weights: Sequence[Tensor], given: Mapping[int, Tensor] | None = None) -> None:
        """Make the constants anew, of `weights`; some are `given` in place of those, by their id.

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
        state = State.of(weights) if not self.constants.discards else State(tuple(weights))
        self.made, self.tensors, self.state = (
            tuple(fresh),
            tuple(one.tensor for one in fresh),
            state,
        )

    def _discard(self, weights: Sequence[Tensor]) -> None:
        for index, weight in zip(self.inputs, weights, strict=True):
            if index not in self.constants.arguments:
                discard(weight)
