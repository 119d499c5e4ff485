"""Constants of a graph as recipes: how each is made of weights.

A recipe is data.  It is kept with the program that reads the constant and followed when that first
runs, and again when the weights have changed: nothing is compiled for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate


@dataclass(frozen=True, slots=True)
class Weight:
    """One of the weights that a recipe takes."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """What an earlier step of a recipe made."""

    step: int


@dataclass(frozen=True, slots=True)
class Do:
    """Call a function; weights and results of earlier steps stand for themselves."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a constant is made; without steps it is the weight itself."""

    weights: tuple[int, ...]  # inputs of the program, by position
    steps: tuple[Do, ...]

    @property
    def text(self) -> str:
        """The steps, the same for all recipes that do the same."""
        return "; ".join(f"{do.target}({do.args}, {do.kwargs})" for do in self.steps)

    def make(self, weights: Sequence[Tensor]) -> Tensor:
        """The constant."""
        # Whoever calls first may be in inference mode; others who call later may not.
        with torch.inference_mode(False), torch.no_grad():
            given = [weight.detach() for weight in weights]
            made: list[Any] = []

            def value(part: Any) -> Any:
                match part:
                    case Weight(number):
                        return given[number]
                    case Made(step):
                        return made[step]
                return part

            for do in self.steps:
                args, kwargs = map_aggregate(do.args, value), map_aggregate(do.kwargs, value)
                made.append(do.target(*args, **kwargs))
            result: Tensor = made[-1] if made else given[0]
            return result


@dataclass(frozen=True, slots=True)
class Constants:
    """What a program reads beside its arguments."""

    recipes: tuple[Recipe, ...]
    arguments: tuple[int, ...]  # inputs of the program that it still reads
    frozen: bool  # made once and for all; otherwise again, when weights have changed
    discards: bool = False  # weights are given back once everything is made of them

    @property
    def are_needed(self) -> bool:
        """Whether a program has to be told of them; of weights that others discarded, as well."""
        return bool(self.recipes) or self.discards
