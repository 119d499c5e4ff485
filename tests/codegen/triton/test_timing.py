"""Which way is the quickest, by a clock that tells what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from stator.codegen.triton.timing import Way, gains, quickest

INFINITE = float("inf")


@dataclass
class Told:
    """Each way returns its seconds; rounds are noted by how many took part."""

    rounds: list[int] = field(default_factory=list)

    def round(self, ways: Sequence[Way]) -> list[float]:
        """What they say."""
        self.rounds.append(len(ways))
        return [float(str(way())) for way in ways]


def ways(*seconds: float) -> list[Way]:
    """Ways that take so long."""
    return [lambda n=n: n for n in seconds]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((100e-6, 80e-6, 90e-6), 1),
        ((100e-6, 98e-6), 0),  # may be noise
        ((4e-6, 3.8e-6), 0),  # less than the clock tells apart
        ((100e-6, 200e-6), 0),
        ((100e-6,), 0),
        ((100e-6, INFINITE, 50e-6), 2),
        ((INFINITE, 100e-6, 120e-6), 1),  # the first does not work
        ((INFINITE, INFINITE), 0),
    ],
)
def test_another_way_has_to_be_clearly_quicker(seconds: tuple[float, ...], expected: int) -> None:
    chosen, taken = quickest(ways(*seconds), Told())

    assert chosen == expected
    assert taken == list(seconds)


def test_what_is_hopeless_is_not_measured_for_long() -> None:
    clock = Told()

    quickest(ways(1e-3, 0.9e-3, 5e-3), clock)

    assert clock.rounds[:5] == [3] * 5  # the first one loads them
    assert set(clock.rounds[5:]) == {2}


def test_a_way_that_was_lucky_once_is_not_taken() -> None:
    calls = iter([90e-6] * 35 + [101e-6] * 200)  # quick until it is asked once more

    chosen, _ = quickest([lambda: 100e-6, lambda: next(calls)], Told())

    assert chosen == 0


def test_long_work_is_done_less_often() -> None:
    short, long = Told(), Told()

    quickest(ways(1e-3, 1e-3), short)
    quickest(ways(1.0, 1.0), long)

    assert len(long.rounds) < len(short.rounds)


def test_a_gain_is_a_share_and_more_than_the_clock_tells() -> None:
    assert gains(100e-6, 96e-6)
    assert not gains(100e-6, 97.5e-6)
    assert not gains(3e-6, 2.6e-6)
