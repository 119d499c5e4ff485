"""What a program does to its inputs, and where its outputs come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from stator.aot.subclasses import PLAIN, Layout
from stator.aot.views import View


class Mutation(Enum):
    """How the new value of an input reaches the user's tensor."""

    NONE = auto()  # it is not mutated
    IN_GRAPH = auto()  # the forward graph writes it: autograd need not know
    COPY = auto()  # `copy_` after the graph, seen by autograd
    METADATA = auto()  # `as_strided_` after the graph: an in-place view
    COPY_AND_METADATA = auto()  # both
    STORAGE = auto()  # `set_` after the graph


@dataclass(frozen=True, slots=True)
class InputFact:
    """One input of the program."""

    layout: Layout = PLAIN
    requires_grad: bool = False
    is_leaf: bool = True
    mutation: Mutation = Mutation.NONE
    bumps: bool = False  # the version counter moves; behind autograd's back it does not

    @property
    def is_returned(self) -> bool:
        """Whether the forward graph returns the new value."""
        return self.mutation not in (Mutation.NONE, Mutation.IN_GRAPH)


class Source(Enum):
    """Where an output of the program comes from."""

    CONSTANT = auto()  # a Python value known when compiling
    GRAPH = auto()  # value `index` of the forward graph
    INPUT = auto()  # input `index` itself, the same object
    VIEW_OF_INPUT = auto()  # made from input `index` after the call
    VIEW_OF_VALUE = auto()  # made from value `index` of the forward graph after the call
    OUTPUT = auto()  # the same object as output `index`


@dataclass(frozen=True, slots=True)
class OutputFact:
    """One output of the program."""

    source: Source
    index: int = 0
    requires_grad: bool = False
    view: View | None = None
    constant: Any = None


@dataclass(frozen=True, slots=True)
class ValueFact:
    """One value that the forward graph returns: an updated input, an output, or a base of views."""

    layout: Layout
    differentiable: bool  # has a tangent
    of_input: int | None = None  # the input of which this is the new value
    of_output: int | None = None  # the output that this is, or the base of
    is_base: bool = False


@dataclass(frozen=True, slots=True)
class TangentPlan:
    """How the tangent of a value must lie in memory; a stride of None: by memory format."""

    layout: Layout
    stride: tuple[int, ...] | None
    channels_last: bool
    is_symbolic: bool = False  # some size is known only at run time


@dataclass(frozen=True, slots=True)
class Program:
    """All that the run-time wrappers need to know of a traced program."""

    inputs: tuple[InputFact, ...]
    outputs: tuple[OutputFact, ...]
    values: tuple[ValueFact, ...]  # what the forward graph returns, in order
    tangents: tuple[TangentPlan, ...]  # one for each differentiable value
    grads: tuple[Layout | None, ...]  # one for each input; None: no gradient flows there
    grad_mode_after: bool | None  # grad mode that the program leaves behind, if it changes it
    draws_random: bool  # whether the graph consumes random numbers
    draws_on: tuple[torch.device, ...] = ()  # GPUs whose generators it moves
    written_late: tuple[int, ...] = ()  # inputs whose new values the backward returns, last

    @property
    def is_training(self) -> bool:
        """Whether there is a backward."""
        return bool(self.tangents)


class Kept(Enum):
    """Where a saved value stands when the forward is through."""

    PRIMAL = auto()  # it is plain input `index`
    VALUE = auto()  # it is plain value `index` of the forward graph
    EXTRA = auto()  # the forward graph returns it behind its values


@dataclass(frozen=True, slots=True)
class Saved:
    """One value that the forward keeps for the backward."""

    kept: Kept
    index: int
    is_tensor: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What is left of a traced program when its graphs are compiled."""

    program: Program
    saved: tuple[Saved, ...] = ()  # tensors first
    needed: tuple[int, ...] = ()  # inputs that the gradients depend on
    backward_error: str | None = None  # what eager raises when it is asked for gradients
