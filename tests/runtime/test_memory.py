"""Places in the arena: buffers that live together never meet, and what escapes has none."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import stator
from stator.core.events import LARGE_ON_GPU, Held, Home
from stator.loops.index import Index, Symbol
from stator.lower.sizes import evaluate
from stator.lower.tensors import contiguous
from stator.runtime.fused import _with_frees
from stator.runtime.memory import (
    ALIGNMENT,
    LINE,
    OWN_LINES,
    POOLED,
    Memory,
    Own,
    allocations,
    home_of_one,
    homes,
    lifetimes,
    memory_text,
    owners,
    place_largest_first,
    plan_memory,
    predicted,
    room_bytes,
    rounded_bytes,
)
from stator.runtime.plan import Allocation, Call, Free, Plan, Step, Together, View
from tests.parity import compiled
from tests.runtime.launches import launch

aten = torch.ops.aten
N, M = Symbol("size_n"), Symbol("size_m")


# --- random plans ---

ESCAPES: Final = (aten.reshape.default, aten.slice.Tensor, torch.sin, aten.dequantize.self)
HARMLESS: Final = (aten.sort.default, aten.convolution.default, aten.cat.default)
TYPES: Final = (torch.float32, torch.float32, torch.int8, torch.float64)

VARYING: Final = (
    Index.of(N),
    Index.of(M),
    2 * Index.of(N),
    Index.of(N) * Index.of(M),
    Index.of(N) + 3,
)
seeds = st.integers(0, 2**32)


@dataclass
class Drawn:
    """A plan, and what was drawn on purpose."""

    plan: Plan
    rooms: dict[str, Allocation] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)  # of buffers and views of them
    escaping: set[str] = field(default_factory=set)  # buffers


class Draw:
    """Draws one step after another; what was made lately is read rather than what is old."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.graph = fx.Graph()
        self.steps: list[Step] = []
        self.parts: list[str] = []  # of results that have several
        self.drawn = Drawn(Plan((), (), ()))

    def recent(self) -> fx.Node:
        return node(self.random.choice(list(self.drawn.roots)[-4:]))

    def size(self) -> tuple[Index, ...]:
        if self.random.random() < 0.4:
            return (self.random.choice(VARYING),)
        counts = (self.random.choice((0, 1, 16, 17, 100, 128, 500)) for _ in range(2))
        return tuple(Index.of(n) for n in counts)

    def make(self, name: str) -> None:
        """A product into a buffer, of what there is."""
        size, dtype = self.size(), self.random.choice(TYPES)
        gaps = self.random.random() < 0.05
        stride = tuple(2 * step for step in contiguous(size)) if gaps else contiguous(size)
        room = Allocation(name, size, stride, dtype)
        read = tuple(self.recent() for _ in range(2) if self.drawn.roots)
        if self.parts and self.random.random() < 0.5:
            read += (node(self.random.choice(self.parts)),)
        self.steps.append(Call(name, aten.mm.default, read, {}, symbol="mm", out=room))
        self.drawn.rooms[name] = room
        self.drawn.roots[name] = name

    def look(self, name: str) -> None:
        source = self.recent()
        root = self.drawn.roots[source.name]
        call = Call(name, aten.alias.default, (source,), {})
        self.steps.append(
            View(source.name, replace(self.drawn.rooms[root], name=name), Index.of(0), call)
        )
        self.drawn.roots[name] = root

    def call(self, name: str, escapes: bool) -> None:
        source = self.recent()
        target = self.random.choice(ESCAPES if escapes else HARMLESS)
        made = None if escapes else Index.of(self.random.randrange(2000))
        self.steps.append(Call(name, target, (source,), {}, bytes=made))
        if escapes:
            self.drawn.escaping.add(self.drawn.roots[source.name])

    def take_apart(self, name: str) -> None:
        """A call with three results, of which some are taken, one perhaps twice."""
        sizes = [self.random.randrange(2000) for _ in range(3)]
        call = Call(name, aten.sort.default, (self.recent(),), {}, bytes=Index.of(sum(sizes)))
        self.steps.append(call)
        for place in self.random.choices(range(3), k=self.random.randrange(4)):
            part, size = f"{name}_{len(self.steps)}", Index.of(sizes[place])
            self.steps.append(Call(part, operator.getitem, (node(name), place), {}, bytes=size))
            self.parts.append(part)

    def run(self) -> Drawn:
        for number in range(self.random.randrange(2, 40)):
            kind, name = self.random.random(), f"v{number}"
            if kind < 0.7 or not self.drawn.roots:
                self.make(name)
            elif kind < 0.8:
                self.look(name)
            elif kind < 0.9:
                self.take_apart(name)
            else:
                self.call(name, escapes=kind > 0.97)
        names = list(self.drawn.roots)
        returned = self.random.sample(names, min(len(names), self.random.randrange(3)))
        nodes = tuple(self.graph.placeholder(name) for name in returned)
        output = self.graph.output(nodes)
        self.drawn.escaping |= {self.drawn.roots[name] for name in returned}
        freed = tuple(_with_frees(self.steps, [], output))
        self.drawn.plan = Plan((), freed, nodes, hints={N: 5, M: 7})
        return self.drawn


def node(name: str) -> fx.Node:
    """A value of a plan, by its name."""
    found: fx.Node = fx.Graph().placeholder(name)
    return found


def read_until(drawn: Drawn) -> dict[str, tuple[int, float]]:
    """For each buffer: where it is made, and where it or a view of it is last read."""
    spans: dict[str, tuple[int, float]] = {}
    for number, step in enumerate(drawn.plan.steps):
        for room in allocations(step):
            spans[room.name] = (number, number)
        for name in (*step.takes, *step.makes):
            root = drawn.roots.get(name)
            if root is not None:
                spans[root] = (spans[root][0], max(number, spans[root][1]))
    for name in drawn.escaping:
        spans[name] = (spans[name][0], math.inf)
    return spans


@settings(max_examples=300, deadline=None)
@given(seeds)
def test_buffers_that_live_together_never_meet(seed: int) -> None:
    drawn = Draw(seed).run()
    memory = plan_memory(drawn.plan)
    spans = read_until(drawn)

    assert drawn.escaping.isdisjoint(memory.offsets)
    for known in ({N: 0, M: 0}, {N: 5, M: 7}, {N: 1, M: 100}, {N: 63, M: 2}):
        places = {
            name: (evaluate(offset, known), evaluate(rounded_bytes(drawn.rooms[name]), known))
            for name, offset in memory.offsets.items()
        }
        total = evaluate(memory.arena, known)
        for name, (start, size) in places.items():
            assert start % ALIGNMENT == 0
            assert 0 <= start <= start + size <= total
            assert size >= evaluate(drawn.rooms[name].elements, known) * itemsize(drawn, name)
        for one, other in combinations(places, 2):
            if spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]:
                first, second = sorted((places[one], places[other]))
                assert first[1] == 0 or second[1] == 0 or sum(first) <= second[0]


def itemsize(drawn: Drawn, name: str) -> int:
    return int(drawn.rooms[name].dtype.itemsize)


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_the_peak_is_that_of_a_simulation(seed: int) -> None:
    drawn = Draw(seed).run()
    plan, memory = drawn.plan, plan_memory(drawn.plan)

    assert predicted(plan, memory) == simulated(plan, memory)


@dataclass
class Piece:
    """Memory that is there while somebody has a name for it."""

    bytes: int
    by_torch: bool
    names: set[str]


def simulated(plan: Plan, memory: Memory) -> Held:
    """One step after another: what it makes is there, then what is freed is not."""
    pieces: list[Piece] = []
    pool = torch = 0
    for step in plan.steps:
        if isinstance(step, Free):
            pieces = [one for one in pieces if one.names - set(step.names)]
            for piece in pieces:
                piece.names -= set(step.names)
            continue
        source = step.source if isinstance(step, View) else None
        if isinstance(step, Call) and step.target is aten.slice.Tensor:
            source = step.takes[0]
        for piece in pieces:
            piece.names |= {*step.makes} if source in piece.names else set()
        pieces += made_by(step, plan, memory)
        pool = max(pool, sum(piece.bytes for piece in pieces if not piece.by_torch))
        torch = max(torch, sum(piece.bytes for piece in pieces if piece.by_torch))
    return Held(evaluate(memory.arena, plan.hints), pool, torch)


def made_by(step: Step, plan: Plan, memory: Memory) -> Iterator[Piece]:
    """What a step makes outside of the arena; parts have all names that they will have."""
    for room in allocations(step):
        if room.name not in memory.offsets:
            size = evaluate(rounded_bytes(room), plan.hints)
            small = size < POOLED
            yield Piece(size if small else room_bytes(size), small, {room.name})
    if not isinstance(step, Call) or step.bytes is None or step.target is operator.getitem:
        return
    taken: dict[int, Piece] = {}
    for part in plan.steps:
        if not isinstance(part, Call) or part.target is not operator.getitem:
            continue
        if part.bytes is not None and part.takes == step.makes:
            piece = Piece(evaluate(part.bytes, plan.hints), True, set())
            taken.setdefault(part.args[1], piece).names.add(part.name)
    yield from taken.values()
    left = evaluate(step.bytes, plan.hints) - sum(piece.bytes for piece in taken.values())
    yield Piece(left, True, {step.name})  # dies with the whole


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_the_arena_is_no_larger_than_all_buffers_and_no_smaller_than_it_must(seed: int) -> None:
    drawn = Draw(seed).run()
    memory, spans = plan_memory(drawn.plan), read_until(drawn)
    known = {N: 5, M: 7}
    sizes = {name: evaluate(rounded_bytes(drawn.rooms[name]), known) for name in memory.offsets}
    together = [
        sum(size for name, size in sizes.items() if spans[name][0] <= now <= spans[name][1])
        for now in range(len(drawn.plan.steps))
    ]

    assert max(together, default=0) <= evaluate(memory.arena, known) <= sum(sizes.values())


def test_the_plans_that_are_drawn_use_places_again() -> None:
    again = looked_at = 0
    for seed in range(100):
        drawn = Draw(seed).run()
        offsets = list(plan_memory(drawn.plan).offsets.values())
        again += len(set(offsets)) < len(offsets)
        looked_at += any(isinstance(step, View) for step in drawn.plan.steps)

    assert again > 50
    assert looked_at > 50


# --- plans made by hand ---


def chain(length: int, size: tuple[int | Index, ...] = (1000,)) -> Plan:
    """One kernel after another; what one makes the next reads and frees."""
    steps: list[Step] = []
    for n in range(length):
        steps += [launch(f"v{n + 1}", f"v{n}", size=size), Free((f"v{n}",))]
    return Plan(("v0",), tuple(steps), (node(f"v{length}"),), hints={N: 10})


@pytest.mark.parametrize("size", [(1000,), (Index.of(N), 4)], ids=["known", "varying"])
def test_a_chain_takes_two_places(size: tuple[int | Index, ...]) -> None:
    made = chain(9, size)
    memory = plan_memory(made)

    assert len(memory.offsets) == 8
    assert len(set(memory.offsets.values())) == 2
    assert "v9" not in memory.offsets


def test_a_smaller_buffer_fits_into_a_larger_hole() -> None:
    steps = (
        launch("a", "x", size=(1000,)),
        launch("b", "a", size=(10,)),
        Free(("a",)),
        launch("c", "b", size=(500,)),
        launch("d", "b", size=(400,)),
        Free(("b", "c", "d")),
        launch("e", "x", size=(1026,)),
    )
    memory = plan_memory(Plan(("x",), steps, (node("e"),)))

    assert {name: offset.constant for name, offset in memory.offsets.items()} == {
        "a": 0,
        "b": 4032,
        "c": 0,
        "d": 2048,
    }
    assert memory.arena.constant == 4032 + 64


def test_the_largest_find_their_places_first() -> None:
    """In order of time, `c` would leave a hole behind it that `d` does not fit into."""
    steps = (
        launch("a", "x", size=(1600,)),
        launch("b", "x", size=(1600,)),
        Free(("a",)),
        launch("c", "x", size=(160,)),
        Free(("b",)),
        launch("d", "c", size=(3200,)),
        Free(("c", "d")),
    )
    memory = plan_memory(Plan(("x",), steps, ()))

    assert memory.arena.constant == 4 * (3200 + 160)
    assert plan_memory(Plan(("x",), steps, ())) == memory


def test_the_better_of_two_placements_is_taken() -> None:
    spans = {"a": (128, 0, 2), "b": (64, 1, 4), "c": (128, 3, 4)}

    assert place_largest_first(spans, 193) == {"a": 0, "c": 0, "b": 128}
    assert place_largest_first(spans, 192) is None


def test_holes_grow_together() -> None:
    steps = (
        launch("a", "x", size=(16,)),
        launch("b", "x", size=(16,)),
        launch("c", "x", size=(16,)),
        Free(("a", "c")),
        Free(("b",)),
        launch("d", "x", size=(48,)),
        Free(("d",)),
    )
    memory = plan_memory(Plan(("x",), steps, ()))

    assert memory.offsets["d"].constant == 0
    assert memory.arena.constant == 192


def test_a_list_makes_all_its_buffers_before_any_is_freed() -> None:
    steps = (Together((launch("a", "x"), launch("b", "x"))), Free(("a", "b")))
    memory = plan_memory(Plan(("x",), steps, ()))

    assert {offset.constant for offset in memory.offsets.values()} == {0, 448}


def test_what_an_operator_might_keep_is_outside() -> None:
    def offsets(target: Any) -> set[str]:
        call = Call("y", target, (node("v1"),), {})
        plan = Plan(("x",), (launch("v1", "x"), call, Free(("v1",))), (node("y"),))
        return set(plan_memory(plan).offsets)

    @torch.library.custom_op("stator_memory::kept", mutates_args=())
    def custom(x: Tensor) -> Tensor:
        return x.clone()

    for keeper in (custom._opoverload, aten.reshape.default, aten.view.default, torch.sin, print):
        assert offsets(keeper) == set()
    for harmless in (aten.sort.default, aten.add.Tensor, aten._softmax.default):
        assert offsets(harmless) == {"v1"}


def test_a_source_of_a_returned_view_is_outside() -> None:
    (room,) = launch("v1", "x").allocations
    views = [
        View(
            source,
            replace(room, name=name),
            Index.of(0),
            Call(name, aten.alias.default, (node(source),), {}),
        )
        for name, source in (("v2", "v1"), ("v3", "v2"))
    ]
    plan = Plan(("x",), (launch("v1", "x"), *views), (node("v3"),))

    assert plan_memory(plan).offsets == {}


def test_what_dies_while_results_come_is_outside() -> None:
    steps = (launch("a", "x"), launch("b", "a"), Free(("a",)), launch("c", "b"), Free(("b",)))
    plan = Plan(("x",), steps, (node("c"),), relays=frozenset({"a"}))

    assert set(plan_memory(plan).offsets) == {"b"}


def test_a_buffer_with_gaps_is_outside() -> None:
    gaps = Allocation("a", (Index.of(4), Index.of(4)), (Index.of(8), Index.of(1)), torch.float32)
    step = Call("a", aten.mm.default, (), {}, symbol="mm", out=gaps)

    assert plan_memory(Plan((), (step, Free(("a",))), ())).offsets == {}


def test_parts_of_a_result_live_as_long_as_they_are_read() -> None:
    steps = (
        Call("both", aten.sort.default, (node("x"),), {}, bytes=Index.of(300)),
        Call("one", operator.getitem, (node("both"), 0), {}, bytes=Index.of(200)),
        Free(("both",)),
        Call("more", aten.sort.default, (node("x"),), {}, bytes=Index.of(1000)),
        Free(("more",)),
        launch("y", "one"),
        Free(("one",)),
    )
    plan = Plan(("x",), steps, (node("y"),))

    lives = {life.name: (life.bytes, life.last) for life in lifetimes(plan, plan_memory(plan))}

    assert lives["both"] == (100, 2)
    assert lives["one"] == (200, 6)
    assert predicted(plan, plan_memory(plan)).torch == 1200


def test_what_is_looked_at_lives_as_long_as_its_views() -> None:
    made = Index.of(400)
    steps = (
        Call("whole", aten.mm.default, (), {}, bytes=made),
        Call("halves", aten.split.Tensor, (node("whole"), 50), {}),
        Free(("whole",)),
        Call("half", operator.getitem, (node("halves"), 1), {}),
        Free(("halves",)),
        Call("other", aten.mm.default, (), {}, bytes=made),
    )
    plan = Plan((), steps, (node("half"), node("other")))

    assert owners(plan) == {"halves": "whole", "half": "whole"}
    assert predicted(plan, plan_memory(plan)).torch == 800


@pytest.mark.parametrize(
    ("elements", "dtype", "expected"),
    [
        (0, torch.float32, 0),
        (1, torch.int8, 64),
        (16, torch.float32, 64),
        (17, torch.float32, 128),
        (1 << 40, torch.float64, 1 << 43),
    ],
)
def test_buffers_are_rounded_up(elements: int, dtype: torch.dtype, expected: int) -> None:
    room = Allocation("a", (Index.of(elements),), (Index.of(1),), dtype)

    assert rounded_bytes(room).constant == expected


def test_a_gpu_s_buffers_are_what_its_allocator_counts() -> None:
    steps = (launch("a", "x"), launch("b", "a", "x"), Free(("a",)), launch("c", "b"), Free(("b",)))
    plan = Plan(("x",), steps, (node("c"),), device=torch.device("cuda", 0))

    memory = plan_memory(plan)

    assert {name: offset.constant for name, offset in memory.offsets.items()} == {"a": 0, "b": 512}
    assert predicted(plan, memory) == Held(1024, 0, 512)


def test_a_gpu_has_no_pool_of_ours() -> None:
    steps = (
        launch("y", "x", size=(LARGE_ON_GPU,)),
        launch("z", "y", size=(LARGE_ON_GPU,)),
        Free(("y",)),
    )
    plan = Plan(("x",), steps, (node("z"),), device=torch.device("cuda", 0))

    assert predicted(plan, plan_memory(plan)) == Held(0, 0, 2 * 4 * LARGE_ON_GPU)
    assert homes(plan, plan_memory(plan), ["saved"]) == {"saved": Home("z", 4 * LARGE_ON_GPU, True)}


@pytest.mark.parametrize("elements", [1 << 14, (1 << 14) + 1, 41_000, 600_000, 700_000, 1 << 20])
def test_rooms_of_the_pool_are_as_large_as_foreseen(elements: int) -> None:
    call = compiled(lambda x: x * 2)
    kept = [call(torch.ones(elements)) for _ in range(3)]  # each behind the other
    stator.trim()
    before = stator.memory().used

    kept.append(call(torch.ones(elements)))
    made = stator.memory().used - before

    assert made == room_bytes(4 * elements)


def test_small_tensors_are_torchs() -> None:
    def held(elements: int) -> Held:
        plan = Plan(("x",), (launch("y", "x", size=(elements,)),), (node("y"),))
        return predicted(plan, plan_memory(plan))

    assert held(POOLED // 4 - 16) == Held(0, 0, POOLED - 64)
    assert held(POOLED // 4) == Held(0, POOLED + OWN_LINES * LINE, 0)
    assert held(POOLED // 4 + 1) == Held(0, POOLED + LINE + OWN_LINES * LINE, 0)


def test_inputs_that_die_share_memory_until_the_last_is_gone() -> None:
    steps = (Free(("x",)), Call("z", aten.mm.default, (), {}, bytes=Index.of(10)), Free(("y",)))
    plan = Plan(("x", "y"), steps, (node("z"),))

    found = predicted(plan, plan_memory(plan), [Own(("x", "y"), 1000, by_torch=True)])

    assert found == Held(0, 0, 1010)


def test_a_tensor_alone_is_a_room() -> None:
    assert home_of_one("x", POOLED + 1, False) == Home("x", POOLED + LINE + OWN_LINES * LINE, False)
    assert home_of_one("x", POOLED - 1, False) == Home("x", POOLED - 1, True)
    assert home_of_one("x", POOLED + 1, True) == Home("x", POOLED + 1, True)


def test_what_is_kept_lies_where_its_root_was_made() -> None:
    large = launch("pooled", "x", size=(POOLED,))
    made = large.allocations[0]
    steps = (
        Call("library", aten.convolution.default, (), {}, bytes=Index.of(4 * POOLED)),
        View("library", replace(made, name="over"), Index.of(0)),  # a kernel stored over it
        large,
        Call("halves", aten.split.Tensor, (node("pooled"), 50), {}),
        Call("half", operator.getitem, (node("halves"), 0), {}),
        View("x", replace(made, name="look"), Index.of(0)),
    )
    plan = Plan(("x",), steps, tuple(map(node, ("library", "over", "half", "look"))))
    room = room_bytes(4 * POOLED)

    assert homes(plan, plan_memory(plan), ("a", "b", "c")) == {
        "a": Home("library", 0, False),  # the caller has it
        "b": Home("pooled", room, False),
        "c": Home("x", 0, False),
    }
    assert homes(plan, plan_memory(plan), ("v", "a", "b", "c"))["a"] == Home(
        "library", 4 * POOLED, True
    )


def test_memory_is_written_for_people() -> None:
    made = chain(2)

    assert memory_text(made, plan_memory(made)) == (
        "memory: arena of 4032 bytes, peak 8064\n"
        "  v1: 4032 bytes, steps 0 to 3, arena at 0\n"
        "  v2: 4032 bytes, steps 2 to 4, its own"
    )
