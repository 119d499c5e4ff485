"""How long work takes on a card, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Protocol

import torch

FIRST_ROUNDS: Final = 4  # after which what is hopeless is left out
HOPELESS: Final = 1.25  # times the quickest
ENOUGH: Final = 0.08  # seconds of the card for the rounds that follow
FEWEST: Final = 6  # rounds
MOST: Final = 30
# Bytes that are written before each: more than a cache holds, and it takes the card longer than
# Python to queue what follows.
RUBBISH: Final = 1 << 28
LEAST_GAIN: Final = 0.03  # of the time of the first way: less may be noise
CLOCK: Final = 5e-7  # seconds: what the card's clock tells apart

Way = Callable[[], object]


class Clock(Protocol):
    """Times some ways of doing the same, in turn."""

    def round(self, ways: Sequence[Way]) -> list[float]:
        """Seconds of each, once; infinity for one that raises."""


@dataclass(slots=True)
class CardClock:
    """The clock of a card.  Before each way the cache is filled with other things."""

    device: torch.device
    rubbish: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rubbish = torch.empty(RUBBISH, dtype=torch.int8, device=self.device)

    def round(self, ways: Sequence[Way]) -> list[float]:
        """The card's events stand right before and behind each."""
        with torch.cuda.device(self.device):
            pairs = [self._timed(way) for way in ways]
            torch.cuda.synchronize()
        return [1e-3 * pair[0].elapsed_time(pair[1]) if pair else float("inf") for pair in pairs]

    def _timed(self, way: Way) -> tuple[Any, Any] | None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.rubbish.zero_()  # while it runs, what follows is queued
        begin.record()
        try:
            way()
        except RuntimeError:  # more shared memory than the card has, say
            return None
        end.record()
        return begin, end


def quickest(ways: Sequence[Way], clock: Clock) -> tuple[int, list[float]]:
    """The number of the quickest way, and the seconds of each.

    The first is the one to be expected: another has to be clearly quicker, and once more where
    only the two of them run, since the best of many is also the luckiest.
    """
    clock.round(ways)  # loads what they are made of
    seconds = _medians(ways, clock, range(len(ways)), FIRST_ROUNDS)
    if min(seconds) == float("inf"):
        return 0, seconds
    limit = HOPELESS * min(seconds)
    hopeful = [n for n, taken in enumerate(seconds) if taken <= limit or n == 0]
    if seconds[0] == float("inf"):
        hopeful.remove(0)
    for number, taken in zip(hopeful, _medians(ways, clock, hopeful, None, seconds), strict=True):
        seconds[number] = taken
    best = min(hopeful, key=seconds.__getitem__)
    if best == 0 or seconds[0] == float("inf"):
        return best, seconds
    if gains(seconds[0], seconds[best]):
        pair = (0, best)
        seconds[0], seconds[best] = _medians(ways, clock, pair, None, seconds)
    return best if gains(seconds[0], seconds[best]) else 0, seconds


def gains(before: float, after: float) -> bool:
    """Whether the second is clearly less."""
    return before - after > max(LEAST_GAIN * before, CLOCK)


def _medians(
    ways: Sequence[Way],
    clock: Clock,
    numbers: Sequence[int],
    rounds: int | None,
    known: Sequence[float] = (),
) -> list[float]:
    """Of some ways, in turn; without a number of rounds, as many as are worth their time."""
    if rounds is None:
        rounds = int(ENOUGH / max(sum(known[n] for n in numbers), 1e-9))
        rounds = min(max(rounds, FEWEST), MOST)
    taken: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(rounds):
        shift = turn % len(numbers)  # none always comes behind the same one
        order = [*numbers[shift:], *numbers[:shift]]
        for number, seconds in zip(order, clock.round([ways[n] for n in order]), strict=True):
            taken[number].append(seconds)
    return [median(taken[number]) for number in numbers]
