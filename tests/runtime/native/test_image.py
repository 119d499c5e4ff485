"""A program holds its objects as long as it lives, and nothing else."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stator
from stator.core.torch_types import Boxed
from stator.runtime.memory import plan_memory
from stator.runtime.native.executor import compile_native, load_native
from stator.runtime.native.image import load_image, why_not_native
from stator.runtime.plan import Call, Constant, Free, Plan, make_plan
from tests.runtime.launches import launch, plan
from tests.runtime.native.executors import by_machine, compiled
from tests.runtime.native.test_prelude import resident

aten = torch.ops.aten


def test_this_machine_runs_host_programs() -> None:
    assert why_not_native() is None


def value(name: str) -> fx.Node:
    found: fx.Node = fx.Graph().placeholder(name)
    return found


def with_weight(weight: Tensor) -> Boxed:
    """x * weight, the weight being a constant of the graph."""
    product = Call("y", aten.mul.Tensor, (value("x"), value("w")), {})
    return by_machine(Plan(("x",), (Constant("w", weight), product), (value("y"),)))


def test_a_constant_lives_as_long_as_its_function() -> None:
    weight = torch.randn(3)
    watched = weakref.ref(weight)
    run = with_weight(weight)
    expected = weight.clone()
    del weight
    gc.collect()

    assert torch.equal(run([torch.ones(3)])[0], expected)
    assert watched() is not None
    del run
    gc.collect()
    assert watched() is None


def test_a_function_dies_without_the_collector() -> None:
    watched = []
    gc.disable()
    try:
        for _ in range(3):
            weight = torch.randn(3)
            watched.append(weakref.ref(weight))
            with_weight(weight)([torch.ones(3)])
            del weight
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


class Owner:
    """Something that a program refers to, and that refers to the program."""

    run: Boxed

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


def own_program() -> Owner:
    return run_by_itself(Owner())


def run_by_itself(owner: Owner) -> Owner:
    owner.run = by_machine(Plan(("x",), (Call("y", owner, (value("x"),), {}),), (value("y"),)))
    return owner


def test_a_program_in_a_circle_is_collected() -> None:
    owners = [own_program() for _ in range(20)]
    assert all(torch.equal(o.run([torch.ones(2)])[0], torch.full((2,), 2.0)) for o in owners)
    watched = [weakref.ref(owner) for owner in owners]
    owners.clear()

    gc.collect()

    assert [ref() for ref in watched] == [None] * 20


def test_a_program_may_be_called_while_it_is_collected() -> None:
    said: list[float] = []

    class Last(Owner):
        def __del__(self) -> None:
            said.append(float(self.run([torch.ones(1)])[0]))

    run_by_itself(Last())
    gc.collect()

    assert said == [2.0]


def test_a_function_may_go_while_it_runs() -> None:
    held: dict[str, Any] = {}

    def forget(x: Tensor) -> Tensor:
        held.clear()
        gc.collect()
        return x + 1

    negated = Call("z", aten.neg.default, (value("y"),), {})
    steps = (Call("y", forget, (value("x"),), {}), negated)
    held["run"] = by_machine(Plan(("x",), steps, (value("z"), value("y"))))

    found = held["run"]([torch.ones(2)])

    assert [result.tolist() for result in found] == [[-2, -2], [2, 2]]


def test_objects_of_a_program_are_counted_right() -> None:
    thing = object()
    before = sys.getrefcount(thing)
    run = by_machine(Plan((), (Constant("c", thing),), (value("c"), value("c"))))
    held = sys.getrefcount(thing)

    for _ in range(100):
        run([])

    assert sys.getrefcount(thing) == held
    del run
    gc.collect()
    assert sys.getrefcount(thing) == before


def test_an_image_is_all_that_a_program_needs() -> None:
    steps = (launch("a", "x"), launch("b", "a", "x"), Free(("a",)))
    made = plan("x", *steps, outputs=(value("b"),))
    image = compile_native(made, plan_memory(made))

    runs = [load_image(image, "test"), load_native(made, image, "test")]

    x = torch.randn(100)
    first, second = (run([x])[0] for run in runs)
    assert torch.equal(first, second)
    assert "method test of" in repr(runs[0])


# --- what calls leave behind ---


def mixed(x: Tensor, w: Tensor, i: Tensor) -> tuple[Any, ...]:
    """Kernels, C functions, Python, views, parts, a check."""
    y = (x @ w).relu()
    top, places = y.topk(2)
    found = torch.nn.functional.embedding(i, w)
    return y[1:], top.t(), places, found, torch.linalg.qr(y)[0], x, None, y.softmax(-1) @ w


def inputs_of_mixed() -> list[Tensor]:
    return [torch.randn(6, 6), torch.randn(6, 6), torch.tensor([1, 0, 5])]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_references_are_given_back(dynamic: bool | None) -> None:
    run = compiled(mixed, "native", dynamic)
    inputs = inputs_of_mixed()
    run(*inputs)
    before = [sys.getrefcount(given) for given in inputs]

    for _ in range(200):
        run(*inputs)

    assert [sys.getrefcount(given) for given in inputs] == before


def test_references_to_none_are_given_back() -> None:
    run = compiled(mixed, "native")
    inputs = inputs_of_mixed()
    run(*inputs)
    gc.collect()
    before = sys.getrefcount(None)

    for _ in range(1000):
        run(*inputs)

    gc.collect()
    assert abs(sys.getrefcount(None) - before) < 500


def test_references_are_given_back_when_a_call_fails() -> None:
    run = compiled(mixed, "native")
    inputs = inputs_of_mixed()
    run(*inputs)
    inputs[2] = torch.tensor([1, 0, 6])
    before = [sys.getrefcount(given) for given in inputs]
    tensors = count_tensors()

    for _ in range(100):
        with pytest.raises(IndexError):
            run(*inputs)

    assert [sys.getrefcount(given) for given in inputs] == before
    assert count_tensors() == tensors


def count_tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def test_references_of_training_are_given_back() -> None:
    run = compiled(lambda x, w: torch.sin(x @ w) @ w, "native")
    x, w = torch.randn(5, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def step() -> None:
        run(x, w).sum().backward()
        x.grad = w.grad = None

    step()
    before, tensors = [sys.getrefcount(x), sys.getrefcount(w)], count_tensors()
    for _ in range(100):
        step()

    assert [sys.getrefcount(x), sys.getrefcount(w)] == before
    assert count_tensors() == tensors


LEAKS: dict[str, Callable[[], Callable[[], Any]]] = {
    "results": lambda: calls_of(mixed, *inputs_of_mixed()),
    "large results": lambda: calls_of(lambda x: torch.sin(x @ x)[1:], torch.randn(200, 200)),
    "layouts": lambda: layouts_mended(),
}


def calls_of(fn: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
    run = compiled(fn, "native")
    return lambda: run(*inputs)


def layouts_mended() -> Callable[[], Any]:
    """Tangents that lie otherwise than planned are copied."""
    run = compiled(lambda x: x.exp() * 2, "native")
    x, tangent = torch.randn(50, 50, requires_grad=True), torch.randn(50, 50).t()

    def step() -> None:
        run(x).backward(tangent)
        x.grad = None

    return step


@pytest.mark.parametrize("name", LEAKS)
def test_a_thousand_calls_leave_nothing_behind(name: str) -> None:
    call = LEAKS[name]()
    for _ in range(100):
        call()
    gc.collect()
    held, before = resident(), stator.memory()

    for _ in range(1000):
        call()
    gc.collect()

    assert stator.memory() == before
    assert resident() - held < 1 << 20


def test_programs_that_died_leave_nothing_behind() -> None:
    def one(n: int) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(aten.add.Tensor, (x, n)),))
        by_machine(make_plan(fx.GraphModule(nn.Module(), graph)))([torch.ones(2)])

    for n in range(20):
        one(n)
    gc.collect()
    held = resident()
    for n in range(100):
        one(n)
    gc.collect()

    assert resident() - held < 4 << 20
