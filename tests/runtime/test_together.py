"""Equal launches joined into one over a list, where nothing between them stands in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from stator.loops.index import Index, Symbol
from stator.lower.sizes import Sizes
from stator.runtime.plan import Call, Constant, Launch, Number, Require, Step, Together
from stator.runtime.together import MOST_BYTES, join_launches
from tests.runtime.launches import launch

aten = torch.ops.aten


hint = Sizes(hints={Symbol("n"): 100}).hint


def joined(*steps: Step) -> list[str]:
    """Names that each step makes, in order; a list of launches in brackets."""
    shown = []
    for step in join_launches(steps, hint):
        name = " ".join(step.makes) or " ".join(step.writes) or type(step).__name__
        shown.append(f"[{name}]" if isinstance(step, Together) else name)
    return shown


def call(target: Any, name: str, *taken: str) -> Call:
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(n) for n in taken)
    return Call(name, target, nodes, {})


def test_equal_launches_become_one_over_a_list() -> None:
    assert joined(launch("a", "x"), launch("b", "y"), launch("c", "z")) == ["[a b c]"]


def test_equal_launches_of_other_lengths_too() -> None:
    assert joined(launch("a", "x"), launch("b", "y", size=(7, 13))) == ["[a b]"]


def test_other_kernels_stay_where_they_are() -> None:
    steps: list[Step] = [
        launch("a", "x"),
        launch("s", "x", "y"),
        launch("b", "y"),
        launch("t", "y", "z"),
    ]

    assert joined(*steps) == ["[a b]", "[s t]"]


def test_a_launch_without_a_companion_stays_a_launch() -> None:
    (step,) = join_launches([launch("a", "x")], hint)

    assert isinstance(step, Launch)


# Dependences


def test_a_reader_of_the_first_is_not_joined_to_it() -> None:
    assert joined(launch("a", "x"), launch("b", "a")) == ["a", "b"]


def test_a_reader_of_what_lies_between_is_not_joined() -> None:
    steps: list[Step] = [launch("a", "x"), call(aten.sin.default, "s", "x"), launch("b", "s")]

    assert joined(*steps) == ["a", "s", "b"]


def test_a_reader_behind_one_that_cannot_join_may_join() -> None:
    steps: list[Step] = [launch("a", "x"), launch("b", "a"), launch("c", "y")]

    assert joined(*steps) == ["[a c]", "b"]


def test_a_chain_behind_the_list_is_joined_as_well() -> None:
    steps: list[Step] = [launch("a", "x"), launch("b", "a"), launch("c", "y"), launch("d", "c")]

    assert joined(*steps) == ["[a c]", "[b d]"]


def test_a_launch_that_overwrites_what_is_read_before_it_is_not_joined() -> None:
    steps: list[Step] = [
        launch("a", "x"),
        call(aten.sin.default, "s", "p"),
        launch("", "q", writes=("p",)),
    ]

    assert joined(*steps) == ["a", "s", "p"]


def test_a_launch_that_overwrites_what_the_first_reads_is_not_joined() -> None:
    assert joined(launch("a", "p"), launch("", "q", writes=("p",))) == ["a", "p"]


def test_a_launch_that_reads_what_the_first_overwrites_is_not_joined() -> None:
    assert joined(launch("", "q", writes=("p",)), launch("a", "p")) == ["p", "a"]


def test_two_launches_into_one_input_are_not_joined() -> None:
    steps: list[Step] = [launch("", "q", writes=("p",)), launch("", "r", writes=("p",))]

    assert joined(*steps) == ["p", "p"]


def test_updates_of_different_inputs_are_joined() -> None:
    steps: list[Step] = [launch("", f"g{n}", writes=(f"p{n}",)) for n in range(4)]

    assert joined(*steps) == ["[p0 p1 p2 p3]"]


def test_a_launch_behind_a_write_to_what_it_reads_is_not_joined() -> None:
    steps: list[Step] = [
        launch("a", "x"),
        call(aten.copy_.default, "w", "p", "x"),
        launch("b", "p"),
    ]

    assert joined(*steps) == ["a", "w", "b"]


def test_a_launch_that_stores_where_a_call_in_between_writes_is_not_joined() -> None:
    steps: list[Step] = [
        launch("a", "x"),
        call(aten.copy_.default, "w", "p", "x"),
        launch("", "q", writes=("p",)),
    ]

    assert joined(*steps) == ["a", "w", "p"]


# Barriers


def test_nothing_is_moved_before_a_check() -> None:
    check = Require("flag", IndexError, "no")
    steps: list[Step] = [launch("a", "x"), check, launch("b", "y"), launch("c", "z")]

    assert joined(*steps) == ["a", "Require", "[b c]"]


def test_numbers_and_constants_are_no_barrier() -> None:
    steps: list[Step] = [
        launch("a", "x"),
        Number("n", Index.of(3)),
        Constant("w", 1),
        launch("b", "w"),
        launch("c", "y"),
    ]

    assert joined(*steps) == ["[a c]", "n", "w", "b"]


# Memory


@pytest.mark.parametrize(
    ("elements", "is_joined"), [(MOST_BYTES // 4, True), (MOST_BYTES // 4 + 1, False)]
)
def test_what_would_live_longer_must_be_small(elements: int, is_joined: bool) -> None:
    steps: list[Step] = [launch("a", "x"), launch("b", "y", size=(elements,))]

    assert joined(*steps) == (["[a b]"] if is_joined else ["a", "b"])


def test_updates_of_large_inputs_cost_no_memory() -> None:
    steps: list[Step] = [launch("", f"g{n}", size=(1 << 24,), writes=(f"p{n}",)) for n in range(2)]

    assert joined(*steps) == ["[p0 p1]"]


def test_unknown_sizes_count_by_their_hints() -> None:
    n = Index.of(Symbol("n"))

    assert joined(launch("a", "x"), launch("b", "y", size=(n,))) == ["[a b]"]
    assert joined(launch("a", "x"), launch("b", "y", size=(n, 1000))) == ["a", "b"]


# What a list is


def test_a_list_makes_takes_and_writes_what_its_launches_do() -> None:
    (step,) = join_launches([launch("a", "x"), launch("", "q", writes=("p",))], hint)

    assert isinstance(step, Together)
    assert step.makes == ("a",)
    assert set(step.takes) == {"x", "q", "p"}
    assert step.writes == ("p",)
    assert step.work.constant == 200
    assert step.nameless.is_list


def test_every_step_is_there_once() -> None:
    steps = [launch(f"a{n}", f"x{n}") for n in range(5)] + [
        launch(f"b{n}", f"a{n}") for n in range(5)
    ]

    made = [name for step in join_launches(steps, hint) for name in step.makes]

    assert sorted(made) == sorted(name for step in steps for name in step.makes)
