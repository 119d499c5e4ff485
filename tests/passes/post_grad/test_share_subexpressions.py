"""Equal calls become one, unless somebody could tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.edit import EARLY
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.share_subexpressions import share_subexpressions
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of

aten = torch.ops.aten

Program = Callable[..., Any]


def shared(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = share_subexpressions(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="share_subexpressions")
    module.recompile()
    return count


FIRES: dict[str, tuple[Program, int]] = {
    "twice": (lambda x: x.sin() + x.sin(), 1),
    "three times": (lambda x: x.sin() + x.sin() * x.sin(), 2),
    "a chain": (lambda x: (x.sin() * 2).exp() + (x.sin() * 2).exp(), 3),
    "views": (lambda x: x.t().sin() + x.t().cos(), 1),
    "one of them returned": (lambda x: (x.sin(), x.sin() + 1), 1),
    "the second one returned": (lambda x: (x.sin() + 1, x.sin()), 1),
    "one view of one memory returned": (lambda x: (x.t() + 1, x.t()), 1),
    "several results": (lambda x: x.max(0)[0] + x.max(0)[1], 3),
    "constants": (lambda x: x + torch.full([3], 2.0) * torch.full([3], 2.0), 1),
    "lists": (lambda x: torch.cat([x, x]).sin() + torch.cat([x, x]), 1),
}

SILENT: dict[str, Program] = {
    "once": lambda x: x.sin() + x.cos(),
    "1 and 1.0": lambda x: aten.add(x, 1) * aten.add(x, 1.0),
    "0.0 and -0.0": lambda x: (x + 0.0) * (x + -0.0),
    "number and truth": lambda x: aten.mul(x, 1) + aten.mul(x, True),
    "another dimension": lambda x: x.sum(0) + x.sum(1),
    "both returned": lambda x: (x.sin(), x.sin()),
    "views of both returned": lambda x: (x.sin().view(-1), x.sin().t()),
    "two views returned": lambda x: (x.t(), x.t()),
    "random": lambda x: aten.rand_like(x) + aten.rand_like(x),
    "memory": lambda x: (aten.copy(aten.empty_like(x), x), aten.empty_like(x)),
    "several results returned": lambda x: (*x.max(0), *x.max(0)),
}


@pytest.mark.parametrize(("fn", "count"), FIRES.values(), ids=FIRES.keys())
def test_equal_calls_are_made_once(fn: Program, count: int) -> None:
    x = torch.randn(3, 3)
    module = graph_of(fn, x)

    assert shared(module) == count
    torch.testing.assert_close(module(x), fn(x), rtol=0, atol=0)


@pytest.mark.parametrize("fn", SILENT.values(), ids=SILENT.keys())
def test_any_other_stays(fn: Program) -> None:
    module = graph_of(fn, torch.randn(3, 3))
    before = str(module.graph)

    assert shared(module) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    for fn, _ in FIRES.values():
        module = graph_of(fn, torch.randn(3, 3))
        before = str(module.graph)

        assert shared(module, fuel=0) == 0
        assert str(module.graph) == before


def test_before_and_after() -> None:
    module = graph_of(lambda x: x.sin() + x.sin(), torch.randn(3))
    assert module.code.strip().splitlines()[1:] == [
        "    sin = torch.ops.aten.sin.default(x_1)",
        "    sin_1 = torch.ops.aten.sin.default(x_1);  x_1 = None",
        "    add = torch.ops.aten.add.Tensor(sin, sin_1);  sin = sin_1 = None",
        "    return add",
    ]
    assert shared(module) == 1
    assert module.code.strip().splitlines()[1:] == [
        "    sin = torch.ops.aten.sin.default(x_1);  x_1 = None",
        "    add = torch.ops.aten.add.Tensor(sin, sin);  sin = None",
        "    return add",
    ]


def test_a_read_behind_a_write_is_another_read() -> None:
    def fn(x: Tensor) -> Tensor:
        old = x.t().sin()
        aten.copy_(x, x * 2)
        return old + x.t().sin()

    module = graph_of(fn, torch.randn(3, 3))

    assert shared(module) == 0
    x = torch.randn(3, 3)
    assert torch.equal(module(x.clone()), fn(x.clone()))


def test_a_write_elsewhere_does_not_matter() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        old = x.sin()
        aten.copy_(y, x)
        return old + x.sin()

    assert shared(graph_of(fn, torch.randn(3), torch.randn(3))) == 1


def test_values_that_are_described_otherwise_are_not_mixed_up() -> None:
    module = graph_of(lambda x: x.sin() + x.sin(), torch.ones(3))
    _, second = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    second.meta["val"] = torch.ones(4)  # as if it had a size that is known only at run time

    assert shared(module) == 0


def test_what_is_computed_early_is_shared_with_its_like_alone() -> None:
    module = graph_of(lambda x: (x.sin() + x.sin()) * (x.sin() - x.sin()), torch.ones(3))
    sines = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    for node in sines[:2]:
        node.meta[EARLY] = True

    assert shared(module) == 2
    left = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert left == [sines[0], sines[2]]


def test_a_second_write_makes_a_third_version() -> None:
    module = graph_of(lambda x: x.sin() + x.sin() + x.sin(), torch.ones(3))
    (x,) = module.graph.find_nodes(op="placeholder")
    _, second, third = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    for node in (second, third):  # each is read behind a write of its own
        with module.graph.inserting_before(node):
            module.graph.call_function(aten.copy_.default, (x, x))

    assert shared(module) == 0


PROGRAMS: dict[str, Program] = {
    "twice": lambda x: x.sin() + x.sin(),
    "both returned": lambda x: (x.sin(), x.sin()),
    "views returned": lambda x: (x.t(), x.t().sin(), x.t().t()),
    "results returned": lambda x: (*x.max(0), *x.max(0)),
    "updated": lambda x: (a := x.detach().sin(), x.detach().mul_(2), a + x.detach().sin())[2],
    "softmax": lambda x: x.softmax(-1) * x.softmax(-1),
    "random": lambda x: torch.rand_like(x) * 0 + torch.rand_like(x) * 0,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled_it_is_eager_s(fn: Program, dynamic: bool) -> None:
    torch.manual_seed(0)
    wants_grad = fn is not PROGRAMS["updated"]
    check(fn, torch.randn(4, 3, requires_grad=wants_grad), dynamic=dynamic)


def test_many_equal_calls_take_time_in_proportion() -> None:
    def fn(x: Tensor) -> Tensor:
        total = x
        for _ in range(500):
            total = total + x.sin()
        return total

    assert shared(graph_of(fn, torch.randn(3))) == 499
