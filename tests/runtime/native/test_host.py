"""Plans made by hand run as machine code: steps, arguments, frees, layouts."""

from __future__ import annotations

import gc
import math
import operator
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx, nn

from stator.loops.index import Index, Symbol
from stator.lower.sizes import Shown
from stator.lower.tensors import contiguous
from stator.runtime.memory import plan_memory
from stator.runtime.native.executor import native_program
from stator.runtime.plan import (
    Allocation,
    Call,
    Constant,
    Free,
    Number,
    Plan,
    Require,
    Step,
    Together,
    View,
    make_plan,
)
from tests.runtime.launches import launch, plan
from tests.runtime.native.executors import assert_same, both, by_machine

aten = torch.ops.aten
LARGE: Final = (1 << 21,)  # elements: kernels run without Python's lock


def node(name: str) -> fx.Node:
    """A value of a plan, by its name."""
    found: fx.Node = fx.Graph().placeholder(name)
    return found


def call(name: str, target: Any, *args: Any, **kwargs: Any) -> Call:
    """A call; names that are strings stand for values."""
    nodes = tuple(node(arg) if isinstance(arg, str) else arg for arg in args)
    return Call(name, target, nodes, kwargs)


def graph_plan(graph: fx.Graph, root: nn.Module | None = None) -> Plan:
    return make_plan(fx.GraphModule(root or nn.Module(), graph))


def agree(made: Plan, *inputs: Any) -> tuple[Any, ...]:
    """Run a plan by both executors on copies of the inputs; what the machine code returned."""
    results = []
    for run in both(made):
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        kept = list(given)
        results.append((*run(given), *kept))
        assert given == []
    for index, (other, mine) in enumerate(zip(*results, strict=True)):
        assert_same(mine, other, f"value {index}")
    found: tuple[Any, ...] = results[1]
    return found


def room(name: str, *size: int | Index, dtype: torch.dtype = torch.float32) -> Allocation:
    dims = tuple(Index.of(n) for n in size)
    return Allocation(name, dims, contiguous(dims), dtype)


# --- kernels ---


def test_a_launch_allocates_and_runs() -> None:
    made = plan("x y", launch("out", "x", "y"), outputs=(node("out"),))

    agree(made, torch.randn(100), torch.randn(100))


@pytest.mark.parametrize("size", [(1,), (100,), LARGE], ids=str)
def test_buffers_between_launches(size: tuple[int, ...]) -> None:
    steps: tuple[Step, ...] = (
        launch("a", "x", size=size),
        launch("b", "a", "x", size=size),
        Free(("a",)),
        launch("c", "b", size=size),
        Free(("b", "x")),
        launch("d", "c", "y", size=size),
        Free(("c", "y")),
    )
    made = plan("x y", *steps, outputs=(node("d"),))
    inside = set() if size is LARGE else {"a", "b", "c"}  # large ones are the pool's
    assert set(plan_memory(made).offsets) == inside

    agree(made, torch.randn(size), torch.randn(size))


def test_sizes_are_read_from_the_inputs() -> None:
    n, m = Index.of(Symbol("size_n")), Index.of(Symbol("size_m"))
    sizes = {"size_m": Shown("x", 0), "size_n": Shown("x", 1, start=1, step=2)}
    steps = (
        launch("a", "x", size=(m, 2 * n + 1)),
        launch("b", "a", "x", size=(m, 2 * n + 1)),
        Free(("a",)),
    )
    made = plan("x", *steps, outputs=(node("b"),), sizes=sizes)
    made = replace(made, hints={Symbol("size_m"): 2, Symbol("size_n"): 1})

    for size in ((2, 3), (5, 1), (1, 1), (300, 401), (0, 3)):
        agree(made, torch.randn(size))


def test_a_launch_over_a_list_runs_each() -> None:
    sizes = ((100,), (7, 13), (1,), (300, 300))
    steps = [launch(f"out{n}", f"x{n}", size=size) for n, size in enumerate(sizes)]
    outputs = tuple(node(f"out{n}") for n in (3, 0, 2, 1, 0))
    made = plan("x0 x1 x2 x3", Together(tuple(steps)), outputs=outputs)

    agree(made, *(torch.randn(size) for size in sizes))


def test_a_launch_into_an_input_changes_it() -> None:
    made = plan("p g", launch("", "g", writes=("p",)), outputs=(node("p"),))

    agree(made, torch.zeros(100), torch.randn(100))


def test_a_number_is_computed_from_the_sizes() -> None:
    n, k = Index.of(Symbol("size_n")), Index.of(Symbol("size_k", is_signed=True))
    numbers = {
        "plain": 3 * n - 1,
        "half": n // 2,
        "rest": (n + 1) % 4,
        "square": n * n,
        "below": (k - 5) // 3,
        "remainder below": (k - 5) % 3,
        "large": n * (1 << 40),
        "constant": Index.of(-7),
    }
    steps = tuple(Number(name.replace(" ", "_"), index) for name, index in numbers.items())
    outputs = tuple(node(step.name) for step in steps)
    sizes = {"size_n": Shown("x", 0), "size_k": Shown("k")}
    made = plan("x k", *steps, outputs=outputs, sizes=sizes)

    for size, signed in ((2, 1), (7, -8), (100, 2**40), (0, -1)):
        agree(made, torch.empty(size), signed)


# --- layouts ---


def laid(*, writes: tuple[str, ...] = ()) -> Plan:
    step = launch("out", "x", size=(10, 10), writes=writes)
    layouts = {"x": ((Index.of(10), Index.of(1)), torch.float32)}
    layouts["p"] = layouts["x"]
    base = plan("p x", step, outputs=() if writes else (node("out"),))
    return replace(base, layouts=layouts)


def test_an_input_that_lies_otherwise_is_copied_first() -> None:
    run = by_machine(laid())
    x = torch.randn(10, 10)

    for given in (x, x.t(), x.double(), x.half().t(), x.unsqueeze(2)[:, :, 0], x[::1]):
        before = given.clone()
        assert torch.equal(run([None, given])[0], -given.float())
        assert torch.equal(given, before)


def test_so_is_one_whose_strides_follow_from_sizes() -> None:
    n = Index.of(Symbol("size_n"))
    made = plan(
        "x",
        launch("out", "x", size=(n, n)),
        outputs=(node("out"),),
        sizes={"size_n": Shown("x", 0)},
    )
    layouts = {"x": ((n, Index.of(1)), torch.float32)}
    made = replace(made, layouts=layouts, hints={Symbol("size_n"): 3})
    run = by_machine(made)

    for size in (3, 10, 1):
        x = torch.randn(size, size)
        for given in (x, x.t(), x.double()):
            assert torch.equal(run([given])[0], -given.float())


def test_so_is_what_an_operator_made() -> None:
    step = launch("out", "y", size=(10, 10))
    layouts = {"y": ((Index.of(10), Index.of(1)), torch.float32)}
    made = plan("x", call("y", aten.t.default, "x"), step, outputs=(node("out"), node("y")))

    agree(replace(made, layouts=layouts), torch.randn(10, 10))


def test_an_input_that_is_stored_into_must_lie_as_planned() -> None:
    run = by_machine(laid(writes=("p",)))

    for wrong in (torch.zeros(10, 10).t(), torch.zeros(10, 10).double()):
        x = torch.ones(10, 10)
        with pytest.raises(RuntimeError, match="compile the function again"):
            run([wrong, x])
        assert not wrong.any()
        assert sys.getrefcount(wrong) == 3  # here, the loop, the call
        assert sys.getrefcount(x) == 2


# --- views ---


def view_plan() -> Plan:
    """Rows 1 to 3 of x * -1, transposed, then negated again."""
    rows = View(
        "a", room("rows", 2, 10), Index.of(10), call("rows", aten.slice.Tensor, "a", 0, 1, 3)
    )
    turned = Allocation(
        "turned", (Index.of(10), Index.of(2)), (Index.of(1), Index.of(10)), torch.float32
    )
    steps: tuple[Step, ...] = (
        launch("a", "x", size=(4, 10)),
        rows,
        View("rows", turned, Index.of(0), call("turned", aten.t.default, "rows")),
        launch("b", "x", size=(4, 10)),
        call("product", aten.mm.default, "rows", "turned"),
        launch("c", "rows", size=(2, 10)),
    )
    return plan("x", *steps, outputs=tuple(map(node, ("product", "c", "turned", "b"))))


def test_views_look_at_the_memory_of_their_source() -> None:
    x = torch.randn(4, 10)

    product, negated, turned, *_ = agree(view_plan(), x)

    assert torch.equal(turned, -x[1:3].t())
    assert torch.equal(negated, x[1:3])
    assert torch.equal(product, x[1:3] @ x[1:3].t())


def test_a_view_that_is_returned_keeps_its_source_out_of_the_arena() -> None:
    assert plan_memory(view_plan()).offsets == {}


# --- checks ---


@pytest.mark.parametrize(
    "flag", [torch.tensor(1), torch.tensor(True), torch.tensor([2.5])], ids=str
)
def test_a_check_raises_its_own_error_if_the_flag_is_set(flag: Tensor) -> None:
    run = by_machine(plan("flag", Require("flag", IndexError, 'out of "range" – ∞')))

    assert run([torch.zeros_like(flag)]) == ()
    with pytest.raises(IndexError, match='out of "range" – ∞'):
        run([flag])
    assert run([torch.zeros_like(flag)]) == ()


def test_nothing_behind_a_broken_check_runs() -> None:
    steps = (Require("flag", ValueError, "no"), launch("", "g", writes=("p",)))
    run = by_machine(plan("flag p g", *steps))
    p = torch.zeros(100)

    with pytest.raises(ValueError, match="no"):
        run([torch.tensor(1), p, torch.ones(100)])

    assert not p.any()


# --- arguments of calls ---

CONSTANTS: Final[dict[str, Any]] = {
    "numbers": (True, 0, -3, 2.5, -0.0, 1e-300, 10**30),
    "nothing": None,
    "text": 'it\'s "text"\n\0',
    "no number": math.nan,
    "complex": 1 + 2j,
    "dtype": torch.bfloat16,
    "device": torch.device("meta"),
    "layout": torch.sparse_coo,
    "nested": [1, [2, (3, [None, (4,)])], ()],
    "slices": [slice(None), (slice(0, 3), 5)],
    "mapping": {"a": [1, {"b": 2.5}], "c": torch.int8},
    "size": torch.Size([2, 3]),
}


def received(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What a function gets that is called from a plan with these arguments, on 4 and a tensor."""
    got: list[Any] = []

    def receive(*given: Any, **named: Any) -> None:
        got.extend((given, named))

    step = Call("none", receive, args, kwargs)
    assert by_machine(plan("n x", step))([4, torch.ones(2)]) == ()
    return tuple(got)


@pytest.mark.parametrize("value", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_a_constant_arrives_as_it_stands_in_the_graph(value: Any) -> None:
    (by_position,), named = received(value, name=value)

    assert repr(by_position) == repr(named["name"])
    assert repr(tuple(by_position) if isinstance(value, tuple) else by_position) == repr(
        tuple(value) if isinstance(value, tuple) else value
    )


def test_values_arrive_inside_of_lists_slices_and_mappings() -> None:
    n, x = node("n"), node("x")

    (listed, part), named = received([x, (n, [x])], slice(0, n, None), key={"x": x, "n": [n]})

    assert listed[0] is listed[1][1][0] is named["key"]["x"]
    assert (listed[1][0], part, named["key"]["n"]) == (4, slice(0, 4), [4])


def test_many_arguments() -> None:
    given, _ = received(*(node("x") if i % 3 else i for i in range(300)))

    assert [value for value in given if not isinstance(value, torch.Tensor)] == list(
        range(0, 300, 3)
    )


def test_parts_of_a_result_are_taken_by_index() -> None:
    graph = fx.Graph()
    parts = graph.call_function(aten.max.dim, (graph.placeholder("x"), 0))
    taken = [graph.call_function(operator.getitem, (parts, i)) for i in (1, 0, 1)]
    graph.output((*taken, None, 7))

    agree(graph_plan(graph), torch.tensor([3.0, 9.0, 1.0]))


def test_constants_are_the_module_s_own() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.randn(2))
    graph = fx.Graph()
    weight = graph.create_node("get_attr", "weight")
    graph.output((weight, graph.call_function(aten.neg.default, (weight,)), weight))

    first, negated, second = by_machine(graph_plan(graph, root))([])

    assert first is second is root.weight
    assert torch.equal(negated, -root.weight)


# --- what the program holds ---


def test_the_list_of_arguments_is_emptied_and_can_be_used_again() -> None:
    run = by_machine(plan("x y", launch("out", "x"), outputs=(node("out"),)))
    box = [torch.randn(100), torch.randn(2)]
    run(box)
    assert box == []

    box += [torch.ones(100), None]  # the second is never read
    assert torch.equal(run(box)[0], -torch.ones(100))
    assert box == []


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_another_number_of_arguments_is_refused(count: int) -> None:
    run = by_machine(plan("x y", launch("out", "x"), outputs=(node("out"),)))
    given = [torch.randn(100) for _ in range(count)]
    kept = list(given)

    with pytest.raises(ValueError, match="arguments"):
        run(given)

    assert [sys.getrefcount(value) for value in kept] == [4] * count  # here, there, the loop


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Values die when nothing refers to them, and not because a collector came by."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_values_die_behind_their_last_reader() -> None:
    alive: dict[str, list[str]] = {}
    watched: dict[str, weakref.ref[Tensor]] = {}

    def make(name: str, *sources: Tensor) -> Tensor:
        alive[name] = sorted(n for n, value in watched.items() if value() is not None)
        fresh = torch.zeros(1)
        watched[name] = weakref.ref(fresh)
        return fresh

    graph = fx.Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    a = graph.call_function(make, ("a", x))
    b = graph.call_function(make, ("b", a))
    graph.call_function(make, ("never read", b))
    c = graph.call_function(make, ("c", b))
    graph.output((graph.call_function(make, ("d", a, c)),))
    run = by_machine(graph_plan(graph))
    box = [torch.zeros(1), torch.zeros(1)]
    for name, value in zip((x.name, unread.name), box, strict=True):
        watched[name] = weakref.ref(value)
    del value

    kept = run(box)

    assert alive == {
        "a": ["x"],  # the unread input is gone before anything runs
        "b": ["a"],
        "never read": ["a", "b"],
        "c": ["a", "b"],
        "d": ["a", "c"],
    }
    assert len(kept) == 1
    assert [name for name, value in watched.items() if value() is not None] == ["d"]


# --- text ---


def test_the_same_plan_is_written_the_same() -> None:
    def text() -> str:
        made = view_plan()
        return native_program(made, plan_memory(made)).text

    assert text() == text()


def test_a_program_without_steps() -> None:
    made = Plan((), (), (None, 3, "text"))

    assert agree(made) == (None, 3, "text")


def test_a_constant_may_be_any_object() -> None:
    thing = object()
    made = Plan((), (Constant("c", thing),), (node("c"), node("c")))

    first, second = by_machine(made)([])

    assert first is second is thing
