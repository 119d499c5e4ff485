"""Which loops run together, in which order, and why others do not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from stator.loops.index import Index
from stator.lower.items import Check, Compute, Extern, Item, Size
from stator.lower.sizes import Sizes
from stator.schedule import fuse as fuse_module
from stator.schedule.fuse import Fused, Group, fuse
from tests.lower.graphs import lowered
from tests.schedule.loops import added, mapped, reduced, result_of, row_sum, tensor

aten = torch.ops.aten


def grouped(*items: Item) -> Fused:
    return fuse(items, Sizes())


def names(fused: Fused) -> list[list[str]]:
    """Names of what each group holds, in order."""
    return [
        [group.alone.name] if group.alone is not None else [m.name for m in group.members]
        for group in fused.groups
    ]


def copy_of(name: str, source: Any, *size: int) -> Compute:
    return mapped(name, size, source.load)


def chain(length: int, *size: int) -> list[Compute]:
    """Loops that each read the one before."""
    loops = [copy_of("m0", tensor("x", *size), *size)]
    for number in range(1, length):
        loops.append(copy_of(f"m{number}", result_of(loops[-1]), *size))
    return loops


def call(target: Any, *args: Any, name: str) -> Extern:
    """A call of torch's: names stand for what it takes."""
    graph = fx.Graph()
    nodes = {n: graph.placeholder(n) for n in args if isinstance(n, str)}
    given = tuple(nodes.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
    return Extern(graph.create_node("call_function", target, given, {}, name=name))


# Together


def test_readers_join_what_they_read() -> None:
    assert names(grouped(*chain(3, 4, 5))) == [["m0", "m1", "m2"]]


def test_readers_of_the_same_memory_run_together() -> None:
    x = tensor("x", 4, 5)

    assert names(grouped(copy_of("a", x, 4, 5), copy_of("b", x, 4, 5))) == [["a", "b"]]


def places(*names: str) -> list[int]:
    """Where names come from, in the order of a set that they were put into one by one."""
    return [names.index(name) for name in {*names}]


@pytest.mark.parametrize("turned", [False, True])
def test_of_neighbours_that_save_as_much_the_first_is_joined(turned: bool) -> None:
    """Also where a set of what is read, or of groups, has another order."""
    wanted = [1, 0] if turned else [0, 1]
    pairs = ((f"x{n}", f"y{n}") for n in range(1000))
    one, other = next(p for p in pairs if places(*p) == places(*reversed(p))[::-1] == wanted)
    x, y = tensor(one, 4, 5), tensor(other, 4, 5)
    others = [copy_of(f"c{n}", tensor(f"z{n}", 2, n), 2, n) for n in range(2, 9)]
    both = mapped("both", (4, 5), lambda p: added(x.load(p), y.load(p)))

    fused = grouped(copy_of("a", x, 4, 5), *others, copy_of("b", y, 4, 5), both)

    assert ["a", "both"] in names(fused)


@pytest.mark.parametrize(
    ("between", "together"),
    [
        ([aten.mm.default], True),
        ([aten.t.default, aten.mm.default, aten.t.default], True),
        ([aten.mm.default, aten.mm.default], False),
    ],
)
def test_what_runs_twice_joins_across_views_and_one_call(
    between: list[Any], together: bool
) -> None:
    x = tensor("x", 4, 4)
    calls = [call(target, "x", name=f"c{number}") for number, target in enumerate(between)]

    fused = fuse([copy_of("a", x, 4, 4), *calls, copy_of("b", x, 4, 4)], Sizes(), late=True)

    assert (["a", "b"] in names(fused)) == together


def test_loops_that_have_nothing_in_common_stay_apart() -> None:
    first, second = copy_of("a", tensor("x", 4), 4), copy_of("b", tensor("y", 4), 4)

    assert names(grouped(first, second)) == [["a"], ["b"]]


def test_a_group_takes_no_more_than_its_limit() -> None:
    fused = grouped(*chain(fuse_module.MOST_MEMBERS + 2, 4))

    assert [len(group) for group in names(fused)] == [fuse_module.MOST_MEMBERS, 2]
    assert any("are enough for one kernel" in reason for reason in fused.refusals)


def test_the_group_that_saves_most_is_asked_first() -> None:
    large, small = copy_of("large", tensor("x", 4, 50), 4, 50), row_sum("small", tensor("y", 4, 9))
    wide = copy_of("wide", tensor("z", 4, 50), 4, 50)
    reader = mapped(
        "reader",
        (4, 50),
        lambda p: added(result_of(wide).load(p), result_of(small).load(p[:1])),
    )

    assert ["wide", "reader"] in names(grouped(large, small, wide, reader))


# Refusals


def test_other_points_without_a_reduction_are_refused_with_a_reason() -> None:
    x = tensor("x", 20)
    first, second = mapped("a", (20,), x.load), mapped("b", (10,), x.load)

    fused = grouped(first, second)

    assert names(fused) == [["a"], ["b"]]
    assert fused.refusals == ["b with a: 10 points against 20, and no reduction to share rows"]


def test_what_runs_in_between_keeps_loops_apart() -> None:
    """b reads a call's result that is made from a."""
    a = copy_of("a", tensor("x", 4), 4)
    middle = call(aten.sort.default, "a", name="middle")
    b = mapped("b", (4,), lambda p: added(result_of(a).load(p), tensor("middle", 4).load(p)))

    fused = grouped(a, middle, b)

    assert names(fused) == [["a"], ["middle"], ["b"]]
    assert fused.refusals == ["b with a: something between them would have to run in the middle"]


def test_a_group_does_not_grow_over_a_long_way_round() -> None:
    """d reads c, which needs b, which needs a: d may not join a."""
    a = copy_of("a", tensor("x", 4, 5), 4, 5)
    b = call(aten.sort.default, "a", name="b")
    c = reduced("c", (4,), (5,), lambda p, r: tensor("b", 4, 5).load((*p, *r)))
    d = mapped("d", (4, 5), lambda p: added(result_of(a).load(p), result_of(c).load(p[:1])))

    assert names(grouped(a, b, c, d)) == [["a"], ["b"], ["c", "d"]]


def test_a_reader_of_another_row_starts_a_group() -> None:
    a = copy_of("a", tensor("x", 4, 4), 4, 4)
    b = mapped("b", (4, 4), lambda p: result_of(a).load((p[1], p[0])))

    fused = grouped(a, b)

    assert names(fused) == [["a"], ["b"]]
    assert "another row" in fused.refusals[0]


# Order


def positions(fused: Fused) -> dict[str, int]:
    return {name: place for place, group in enumerate(names(fused)) for name in group}


def require_order(items: Sequence[Item], fused: Fused) -> None:
    """Everything once, and every reader behind or beside what it reads."""
    place = positions(fused)
    assert sorted(place) == sorted({item.name for item in items})
    for item in items:
        for name in item.reads & place.keys():
            assert place[name] <= place[item.name], f"{item.name} before {name}"


def test_a_group_that_grew_runs_behind_what_its_last_member_needs() -> None:
    x = tensor("x", 4, 5)
    a = copy_of("a", x, 4, 5)
    y = call(aten.sort.default, "z", name="y")
    b = mapped("b", (4, 5), lambda p: added(result_of(a).load(p), tensor("y", 4, 5).load(p)))

    fused = grouped(a, y, b)

    assert names(fused) == [["y"], ["a", "b"]]


def test_calls_stay_behind_what_they_read_and_before_who_reads_them() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.softmax(-1)
        z = y @ w
        return (z.relu() + y).sum(-1) @ w

    lowering = lowered(fn, torch.empty(6, 6), torch.empty(6, 6))

    require_order(lowering.items, fuse(lowering.items, lowering.sizes))


def test_items_without_dependences_keep_their_order() -> None:
    loops = [copy_of(f"m{i}", tensor(f"x{i}", 4), 4) for i in range(12)]

    assert names(grouped(*loops)) == [[loop.name] for loop in loops]


def test_checks_come_behind_their_flags() -> None:
    flag = copy_of("flag", tensor("x"))
    check = Check("flag", IndexError, "no")

    assert names(grouped(flag, check)) == [["flag"], ["flag_checked"]]


def test_sizes_wait_for_nothing() -> None:
    assert names(grouped(Size("n", Index.of(3)))) == [["n"]]


# Effects


def test_calls_with_effects_keep_their_order() -> None:
    draws = [call(aten.rand.default, [3], name=f"draw{i}") for i in range(4)]
    late = copy_of("late", tensor("draw0", 3), 3)

    order = names(grouped(*draws[:2], late, *draws[2:]))

    assert [name for (name,) in order if name.startswith("draw")] == [f"draw{i}" for i in range(4)]


def test_a_write_comes_behind_everything_before_it() -> None:
    """Whoever reads the input has to be through, and so has whoever reads a view of it."""
    reader = copy_of("reader", tensor("x", 4), 4)
    unrelated = copy_of("unrelated", tensor("y", 4), 4)
    write = call(aten.copy_.default, "x", "z", name="write")

    fused = grouped(reader, unrelated, write)

    assert names(fused)[-1] == ["write"]


def test_a_reader_behind_a_write_does_not_join_those_before_it() -> None:
    """It reads what the write returns."""
    before = copy_of("before", tensor("x", 4), 4)
    write = call(aten.copy_.default, "x", "before", name="write")
    after = mapped(
        "after", (4,), lambda p: added(tensor("x", 4).load(p), tensor("write", 4).load(p))
    )

    assert names(grouped(before, write, after)) == [["before"], ["write"], ["after"]]


def test_parts_of_a_result_are_no_effects() -> None:
    pair = call(aten.max.dim, "x", 0, name="pair")
    part = call(operator.getitem, "pair", 0, name="part")

    assert names(grouped(pair, part)) == [["pair"], ["part"]]


# Groups


def test_a_group_leads_if_a_member_reduces() -> None:
    total = row_sum("total", tensor("x", 4, 5))

    assert Group([total]).leads
    assert not Group(chain(2, 4)).leads


def test_a_group_reads_what_its_members_read() -> None:
    assert Group(chain(3, 4)).reads == {"x", "m0", "m1"}
    assert Group(alone=Check("flag", IndexError, "no")).reads == {"flag"}


@pytest.mark.parametrize(("part", "alone"), [(2, 1), (1, 2)])
def test_a_single_row_does_not_take_in_what_threads_would_share(part: int, alone: int) -> None:
    """A sum of all elements has one row; the loop before it has work for several threads."""
    length = fuse_module.WORTH_THREADS // part
    large = copy_of("large", tensor("x", length), length)
    made = result_of(large)
    total = reduced("total", (), (length,), lambda _, r: made.load(r))

    assert len(names(grouped(large, total))) == alone
