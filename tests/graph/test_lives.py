"""Bytes that live at once in an order of tasks, and an order in which they are fewer."""

from __future__ import annotations

import random
import time

from stator.graph.lives import Value, frugal_order, peak_bytes


def branches(count: int) -> tuple[list[set[int]], list[Value]]:
    """All large values first, then a small one of each, then one that reads all small ones."""
    waits: list[set[int]] = [set() for _ in range(count)]
    waits += [{task} for task in range(count)]
    waits.append(set(range(count, 2 * count)))
    values = [Value(100, task, {count + task}) for task in range(count)]
    values += [Value(1, count + task, {2 * count}) for task in range(count)]
    values.append(Value(1, 2 * count, stays=True))
    return waits, values


def test_values_live_from_their_maker_to_their_last_reader() -> None:
    values = [Value(10, 0, {1, 2}), Value(5, 1, {2}), Value(1, 2, stays=True)]

    assert peak_bytes([0, 1, 2], values) == 16
    assert peak_bytes([0, 1, 2], [*values, Value(100, None, {0})]) == 110  # gone when 1 runs


def test_what_nobody_reads_is_gone_at_once() -> None:
    assert peak_bytes([0, 1], [Value(10, 0), Value(10, 1)]) == 10
    assert peak_bytes([0, 1], [Value(10, 0, stays=True), Value(10, 1)]) == 20
    assert peak_bytes([], []) == 0


def test_one_branch_runs_after_the_other() -> None:
    waits, values = branches(3)

    assert frugal_order(waits, values) == [0, 3, 1, 4, 2, 5, 6]
    assert peak_bytes(list(range(7)), values) == 301
    assert peak_bytes(frugal_order(waits, values), values) == 103


def test_of_equals_the_first_runs() -> None:
    assert frugal_order([set(), set(), set()], []) == [0, 1, 2]


def test_every_task_runs_once_behind_those_it_waits_for() -> None:
    chance = random.Random(0)
    for _ in range(50):
        count = chance.randrange(1, 30)
        waits = [{chance.randrange(task) for _ in range(2) if task} for task in range(count)]
        readers: list[set[int]] = [set() for _ in range(count)]
        for task, needed in enumerate(waits):
            for other in needed:
                readers[other].add(task)
        values = [Value(chance.randrange(9), task, readers[task]) for task in range(count)]

        order = frugal_order(waits, values)

        assert sorted(order) == list(range(count))
        assert all(order.index(a) < order.index(b) for b in range(count) for a in waits[b])
        assert order == frugal_order(waits, values)


def test_a_long_list_is_ordered_soon() -> None:
    waits, values = branches(20_000)
    begun = time.perf_counter()

    frugal_order(waits, values)

    assert time.perf_counter() - begun < 5  # squared, it would take minutes
