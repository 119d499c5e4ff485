"""Solvers of the knapsack, held against all choices there are."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from stator.aot.partition.knapsack import SOLVERS, Solver, dynamic, exact


def problem(seed: int) -> tuple[list[int], list[float], int]:
    draw = random.Random(seed)
    count = draw.randint(0, 9)
    sizes = [draw.choice([0, 1, 7, 64, 1000, 4096]) * draw.randint(1, 9) for _ in range(count)]
    worths = [draw.choice([0.0, 1.0, draw.random() * 100]) for _ in range(count)]
    return sizes, worths, draw.randint(0, sum(sizes) + 10)


def best(sizes: list[int], worths: list[float], room: int) -> float:
    places = range(len(sizes))
    choices = chain.from_iterable(combinations(places, count) for count in range(len(sizes) + 1))
    fitting = [choice for choice in choices if sum(sizes[i] for i in choice) <= room]
    return max(sum(worths[i] for i in choice) for choice in fitting)


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())
def test_what_is_chosen_fits(solve: Solver) -> None:
    for seed in range(200):
        sizes, worths, room = problem(seed)

        chosen = solve(sizes, worths, room)

        assert sum(sizes[place] for place in chosen) <= room, f"seed {seed}"
        assert chosen == sorted({*chosen}), f"seed {seed}"


@pytest.mark.parametrize("solve", [exact, dynamic], ids=["ilp", "dp"])
def test_nothing_worth_more_fits(solve: Solver) -> None:
    for seed in range(200):
        sizes, worths, room = problem(seed)
        found = sum(worths[place] for place in solve(sizes, worths, room))

        assert found == pytest.approx(best(sizes, worths, room), abs=1e-4), f"seed {seed}"


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())
def test_all_is_chosen_where_all_fits(solve: Solver) -> None:
    assert solve([5, 6], [1.0, 0.0], 11) == [0, 1]
    assert solve([], [], 0) == []
