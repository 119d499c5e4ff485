"""The Python executor runs plans: literals, frees, boxed arguments, readable tracebacks."""

from __future__ import annotations

import gc
import linecache
import math
import operator
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx, nn

from stator.core.torch_types import Boxed
from stator.loops.index import Index, Symbol
from stator.lower.sizes import Shown
from stator.runtime.plan import Number, Require, Together, make_plan
from stator.runtime.python import WORTH_THREADS, _threads, load_plan
from tests.runtime.launches import launch, plan

aten = torch.ops.aten


def loaded(graph: fx.Graph, root: nn.Module | None = None, label: str = "test") -> Boxed:
    return load_plan(make_plan(fx.GraphModule(root or nn.Module(), graph)), label)


def given_to(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What a function gets that is called from a plan with these arguments."""
    received: list[Any] = []

    def receive(*got: Any, **named: Any) -> None:
        received.extend((got, named))

    graph = fx.Graph()
    graph.call_function(receive, args, kwargs)
    graph.output(())
    loaded(graph)([])
    return tuple(received)


# Running


def test_a_plan_computes_what_its_graph_does() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mm = graph.call_function(aten.mm.default, (x, w))
    relu = graph.call_function(aten.relu.default, (mm,))
    graph.output((relu, mm, None, 7))
    a, b = torch.randn(2, 3), torch.randn(3, 4)

    results = loaded(graph)([a, b])

    assert torch.equal(results[0], (a @ b).relu())
    assert torch.equal(results[1], a @ b)
    assert tuple(results[2:]) == (None, 7)


def test_a_plan_can_run_again() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(aten.neg.default, (graph.placeholder("x"),)),))
    run = loaded(graph)

    assert [run([torch.tensor(n)])[0].item() for n in (1, 2)] == [-1, -2]


def test_parts_of_a_result_are_taken_by_index() -> None:
    graph = fx.Graph()
    parts = graph.call_function(aten.max.dim, (graph.placeholder("x"), 0))
    taken = [graph.call_function(operator.getitem, (parts, i)) for i in (1, 0)]
    graph.output(tuple(taken))

    places, largest = loaded(graph)([torch.tensor([3.0, 9.0, 1.0])])

    assert (places.item(), largest.item()) == (1, 9)


def test_one_input_alone_is_unpacked() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    x = torch.randn(2)

    assert loaded(graph)([x])[0] is x


def test_constants_are_the_module_s_own() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.randn(2))
    graph = fx.Graph()
    graph.output((graph.create_node("get_attr", "weight"),))

    assert loaded(graph, root)([])[0] is root.weight


def test_a_function_without_a_name_can_be_called() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(lambda v: v + 1, (graph.placeholder("x"),)),))

    assert loaded(graph)([torch.tensor(5)])[0].item() == 6


# Arguments


CONSTANTS: dict[str, Any] = {
    "numbers": (True, 0, -3, 2.5, -0.0, 1e-300),
    "nothing": None,
    "text": 'it\'s "text"\n',
    "no number": math.nan,
    "infinity": math.inf,
    "negative infinity": [-math.inf],
    "complex": 1 + 2j,
    "dtype": torch.bfloat16,
    "device": torch.device("meta"),
    "layout": torch.sparse_coo,
    "memory format": torch.channels_last,
    "nested": [1, [2, (3, [None, (4,)])], ()],
    "slice": slice(1, None, 2),
    "slices": [slice(None), (slice(0, 3), 5)],
    "mapping": {"a": [1, {"b": 2.5}], "c": torch.int8},
    "size": torch.Size([2, 3]),
}


@pytest.mark.parametrize("value", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_a_constant_arrives_as_it_stands_in_the_graph(value: Any) -> None:
    (by_position,), named = given_to(value, name=value)

    assert repr(by_position) == repr(named["name"])
    # A size is a tuple to every operator.
    assert repr(by_position) == repr(tuple(value) if isinstance(value, torch.Size) else value)


@pytest.mark.parametrize("value", [torch.float32, torch.strided, 1j], ids=repr)
def test_an_object_arrives_itself(value: Any) -> None:
    (by_position, (inside,)), _ = given_to(value, [value])

    assert by_position is value
    assert inside is value


def test_values_arrive_inside_of_lists_slices_and_mappings() -> None:
    received: list[Any] = []
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    graph.call_function(
        lambda *args, **kwargs: received.extend((args, kwargs)),
        ([x, (n, [x])], slice(0, n)),
        {"by_name": {"x": x}},
    )
    graph.output(())
    value = torch.randn(2)

    loaded(graph)([value, 4])

    ((pair, (number, (inner,))), part), named = received
    assert all(found is value for found in (pair, inner, named["by_name"]["x"]))
    assert (number, part) == (4, slice(0, 4))


def test_operators_get_their_keywords() -> None:
    graph = fx.Graph()
    keywords = {"dtype": torch.float64, "device": torch.device("cpu")}
    full = graph.call_function(aten.full.default, ([2, 3], math.inf), keywords)
    graph.output((full,))

    (found,) = loaded(graph)([])

    assert found.dtype == torch.float64
    assert torch.equal(found, torch.full((2, 3), math.inf, dtype=torch.float64))


def test_a_tensor_is_indexed_by_slices() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(operator.getitem, (x, (slice(None), slice(1, None)))),))
    value = torch.randn(2, 3)

    assert torch.equal(loaded(graph)([value])[0], value[:, 1:])


# Memory


def test_the_list_of_arguments_is_emptied() -> None:
    graph = fx.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("y")
    graph.output((x,))
    box = [torch.randn(2), torch.randn(2)]

    loaded(graph)(box)

    assert box == []


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
    d = graph.call_function(make, ("d", a, c))
    graph.output((d,))
    run = loaded(graph)
    box = [torch.zeros(1), torch.zeros(1)]
    for name, value in zip((x.name, unread.name), box, strict=True):
        watched[name] = weakref.ref(value)
    del value

    run(box)

    assert alive == {
        "a": ["x"],  # the unread input is gone before anything runs
        "b": ["a"],
        "never read": ["a", "b"],
        "c": ["a", "b"],
        "d": ["a", "c"],
    }


@pytest.mark.usefixtures("no_collector")
def test_what_is_not_returned_is_dead_after_the_call() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(aten.sin.default, (x,))
    graph.output((graph.call_function(aten.cos.default, (sin,)),))
    run = loaded(graph)
    box = [torch.randn(2)]
    watched = weakref.ref(box[0])

    kept = run(box)

    assert watched() is None
    assert len(kept) == 1


# Tracebacks


def failing() -> Boxed:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sin = graph.call_function(aten.sin.default, (x,))
    product = graph.create_node("call_function", aten.mm.default, (sin, y), name="product")
    graph.output((product,))
    return loaded(graph, label="backward")


def test_a_traceback_shows_label_and_generated_line() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        failing()([torch.randn(2, 3), torch.randn(2, 3)])

    text = "".join(traceback.format_exception(caught.value))
    assert "<stator backward " in text
    assert "product = _mm_default_" in text


def test_too_few_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        failing()([torch.randn(2, 3)])


# Kernels


def node(name: str) -> fx.Node:
    """A value of a plan, by its name."""
    found: fx.Node = fx.Graph().placeholder(name)
    return found


def test_a_launch_allocates_and_runs() -> None:
    run = load_plan(plan("x y", launch("out", "x", "y"), outputs=(node("out"),)), "test")
    x, y = torch.randn(100), torch.randn(100)

    (out,) = run([x, y])

    assert torch.equal(out, x + y)


def test_a_launch_of_unknown_size_allocates_what_the_inputs_show() -> None:
    n, m = Index.of(Symbol("size_n")), Index.of(Symbol("size_m"))
    step = launch("out", "x", size=(m, n + 1))
    sizes = {"size_m": Shown("x", 0), "size_n": Shown("x", 1, start=1)}
    run = load_plan(plan("x", step, outputs=(node("out"),), sizes=sizes), "test")

    for size in ((2, 3), (5, 1), (1, 1), (300, 400)):
        x = torch.randn(size)
        (out,) = run([x])
        assert out.stride() == x.stride()
        assert torch.equal(out, -x)


def test_a_launch_over_a_list_runs_each() -> None:
    sizes = ((100,), (7, 13), (1,), (300, 300))
    steps = [launch(f"out{n}", f"x{n}", size=size) for n, size in enumerate(sizes)]
    outputs = tuple(node(f"out{n}") for n in range(len(sizes)))
    names = " ".join(f"x{n}" for n in range(len(sizes)))
    run = load_plan(plan(names, Together(tuple(steps)), outputs=outputs), "test")
    inputs = [torch.randn(size) for size in sizes]

    results = run(list(inputs))

    for result, value in zip(results, inputs, strict=True):
        assert torch.equal(result, -value)


def test_a_launch_into_an_input_returns_nothing_and_changes_it() -> None:
    run = load_plan(plan("p g", launch("", "g", writes=("p",))), "test")
    p, g = torch.zeros(100), torch.randn(100)

    assert run([p, g]) == ()
    assert torch.equal(p, -g)


def test_an_input_that_lies_otherwise_is_copied_first() -> None:
    step = launch("out", "x", size=(10, 10))
    layouts = {"x": ((Index.of(10), Index.of(1)), torch.float32)}
    base = plan("x", step, outputs=(node("out"),))
    run = load_plan(replace(base, layouts=layouts), "test")
    x = torch.randn(10, 10)

    for given in (x, x.t(), x.double()):
        assert torch.equal(run([given])[0], -given.float())


def test_an_input_that_is_stored_into_must_lie_as_planned() -> None:
    step = launch("", "g", size=(10, 10), writes=("p",))
    layouts = {"p": ((Index.of(10), Index.of(1)), torch.float32)}
    run = load_plan(replace(plan("p g", step), layouts=layouts), "test")

    with pytest.raises(RuntimeError, match="compile the function again"):
        run([torch.zeros(10, 10).t(), torch.zeros(10, 10)])


def test_a_check_raises_its_own_error_if_the_flag_is_set() -> None:
    run = load_plan(plan("flag", Require("flag", IndexError, 'out of "range"')), "test")

    assert run([torch.tensor(0)]) == ()
    with pytest.raises(IndexError, match='out of "range"'):
        run([torch.tensor(1)])


def test_nothing_behind_a_broken_check_runs() -> None:
    steps = (Require("flag", ValueError, "no"), launch("", "g", writes=("p",)))
    run = load_plan(plan("flag p g", *steps), "test")
    p = torch.zeros(100)

    with pytest.raises(ValueError, match="no"):
        run([torch.tensor(1), p, torch.ones(100)])

    assert torch.equal(p, torch.zeros(100))


def test_a_number_is_computed_from_the_sizes() -> None:
    n = Index.of(Symbol("size_n"))
    numbers = {"plain": 3 * n - 1, "half": n // 2, "rest": (n + 1) % 4, "square": n * n}
    steps = tuple(Number(name, index) for name, index in numbers.items())
    outputs = tuple(node(name) for name in numbers)
    run = load_plan(plan("x", *steps, outputs=outputs, sizes={"size_n": Shown("x", 0)}), "test")

    for size in (2, 7, 100):
        expected = (3 * size - 1, size // 2, (size + 1) % 4, size * size)
        assert run([torch.empty(size)]) == expected


# On a GPU


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices that were current, and those that tensors were made on; the CPU plays them."""
    seen: list[Any] = []
    empty = torch.empty_strided

    @contextmanager
    def current(number: int) -> Iterator[None]:
        seen.append(f"enter {number}")
        try:
            yield
        finally:
            seen.append(f"leave {number}")

    def made(*shape: Any, device: Any = None, **settings: Any) -> Tensor:
        seen.append(device)
        return empty(*shape, **settings)

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch, "empty_strided", made)
    return seen


def test_a_plan_on_a_gpu_makes_its_tensors_there(entered: list[Any]) -> None:
    where = torch.device("cuda", 1)
    steps = (launch("a", "x"), launch("b", "a", "y"))
    run = load_plan(replace(plan("x y", *steps, outputs=(node("b"),)), device=where), "test")
    x, y = torch.randn(100), torch.randn(100)

    (result,) = run([x, y])

    assert torch.equal(result, y - x)
    assert entered == ["enter 1", where, where, "leave 1"]


def test_the_device_before_is_current_again_where_a_plan_fails(entered: list[Any]) -> None:
    made = plan("flag", Require("flag", IndexError, "out of range"))
    run = load_plan(replace(made, device=torch.device("cuda", 0)), "test")

    assert run([torch.tensor(0)]) == ()
    with pytest.raises(RuntimeError, match="out of range"):  # at once, since it is on the CPU
        run([torch.tensor(1)])
    assert entered == ["enter 0", "leave 0"] * 2


def test_a_kernel_is_launched_by_one_thread() -> None:
    made = replace(plan("x", launch("y", "x", size=(1 << 20,))), device=torch.device("cuda", 0))

    run: Any = load_plan(made, "test")
    lines = linecache.getlines(run.__code__.co_filename)

    (line,) = [line for line in lines if "_kernel_" in line]
    assert line.endswith(", 1048576, 1)\n")


WORK: Final = {
    "little": (Index.of(WORTH_THREADS - 1), "1"),
    "enough": (Index.of(WORTH_THREADS), "all"),
    "unknown": (2 * Index.of(Symbol("n")), f"all if 2*n >= {WORTH_THREADS} else 1"),
}


@pytest.mark.parametrize("name", WORK)
def test_threads_are_asked_for_where_there_is_work(name: str) -> None:
    work, expected = WORK[name]

    assert _threads(work, "all") == expected
