"""Small decisions that can be made again: drawn by Hypothesis, or from a list of numbers.

The first option is the simplest one, so smaller numbers mean simpler kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeAlias, TypeVar

from hypothesis import strategies as st

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
T = TypeVar("T")


class Choices(ABC):
    """Makes decisions."""

    @abstractmethod
    def below(self, count: int) -> int:
        """A number from 0 to below `count`."""

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        return low + self.below(high - low + 1)

    def one_of(self, options: Sequence[T]) -> T:
        """One of several things."""
        return options[self.below(len(options))]

    def chance(self, of: int) -> bool:
        """True once in `of` times."""
        return self.below(of) == of - 1

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The same things in some order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


@dataclass(frozen=True, slots=True)
class Drawn(Choices):
    """Decisions of Hypothesis."""

    draw: Draw

    def below(self, count: int) -> int:
        return int(self.draw(_below(count)))


@cache
def _below(count: int) -> st.SearchStrategy[int]:
    """Made once: making a strategy takes longer than drawing from it."""
    return st.integers(0, count - 1)


@dataclass(slots=True)
class Recorded(Choices):
    """Decisions from a list, then at random; without randomness, the simplest ones."""

    given: Sequence[int] = ()
    random: Random | None = None
    made: list[int] = field(default_factory=list)

    def below(self, count: int) -> int:
        place, chosen = len(self.made), 0
        if place < len(self.given):
            chosen = min(self.given[place], count - 1)
        elif self.random is not None:
            chosen = self.random.randrange(count)
        self.made.append(chosen)
        return chosen
