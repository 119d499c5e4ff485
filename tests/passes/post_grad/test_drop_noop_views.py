"""Views that change nothing are dropped; all others, and those the caller gets, stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.drop_noop_views import VIEWS, drop_noop_views

aten = torch.ops.aten

Program = Callable[..., Any]


def graph_of(fn: Program, *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    """`fn` recorded operator by operator, with fake values."""
    module: fx.GraphModule = make_fx(fn, tracing_mode=mode)(*inputs)
    return module


def dropped(module: fx.GraphModule, fuel: int | None = None) -> int:
    """Run the pass; how many views it says it dropped."""
    count = drop_noop_views(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="drop_noop_views")
    module.recompile()
    return count


def views_in(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.target in VIEWS]


def strided(*shape: int, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride).normal_()


# Each reads a view that changes nothing.
FIRES: dict[str, Program] = {
    "alias": lambda x: aten.alias(x) + 1,
    "detach": lambda x: aten.detach(x) + 1,
    "view": lambda x: aten.view(x, [2, 3]) + 1,
    "inferred size": lambda x: aten.view(x, [-1, 3]) + 1,
    "expand": lambda x: aten.expand(x, [2, 3]) + 1,
    "expand keeps -1": lambda x: aten.expand(x, [-1, 3]) + 1,
    "unsafe view": lambda x: aten._unsafe_view(x, [2, 3]) + 1,
    "read twice": lambda x: (aten.alias(x), aten.alias(x))[0] * aten.sin(aten.alias(x)),
}

# Each view in these changes something, or is returned.
SILENT: dict[str, tuple[Program, Tensor]] = {
    "other shape": (lambda x: aten.view(x, [3, 2]) + 1, torch.randn(2, 3)),
    "one dimension more": (lambda x: aten.view(x, [1, 2, 3]) + 1, torch.randn(2, 3)),
    "larger": (lambda x: aten.expand(x, [2, 3]) + 1, torch.randn(1, 3)),
    "returned": (lambda x: aten.view(aten.sin(x), [2, 3]), torch.randn(2, 3)),
    "returned among others": (lambda x: [aten.sin(x), aten.alias(x)], torch.randn(2, 3)),
    "sparse": (lambda x: aten.detach(x).to_dense() + 1, torch.eye(3).to_sparse()),
    "a view of another kind": (lambda x: aten.t(x) + 1, torch.randn(2, 2)),
}


@pytest.mark.parametrize("fn", FIRES.values(), ids=FIRES.keys())
def test_a_view_that_changes_nothing_is_dropped_and_the_result_is_eager_s(fn: Program) -> None:
    x = torch.randn(2, 3)
    module = graph_of(fn, x)
    found = len(views_in(module))

    assert found > 0
    assert dropped(module) == found
    assert views_in(module) == []
    assert torch.equal(module(x), fn(x))


@pytest.mark.parametrize(("fn", "x"), SILENT.values(), ids=SILENT.keys())
def test_any_other_view_stays(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)
    before = str(module.graph)

    assert dropped(module) == 0
    assert str(module.graph) == before


@pytest.mark.parametrize("fn", FIRES.values(), ids=FIRES.keys())
def test_without_fuel_nothing_changes(fn: Program) -> None:
    module = graph_of(fn, torch.randn(2, 3))
    before = str(module.graph)

    assert dropped(module, fuel=0) == 0
    assert str(module.graph) == before


def test_fuel_is_spent_view_by_view() -> None:
    def fn(x: Tensor) -> Tensor:
        y: Tensor = aten.alias(aten.sin(aten.alias(x))) + 1
        return y

    x = torch.randn(2, 3)
    module = graph_of(fn, x)

    assert dropped(module, fuel=1) == 1
    assert len(views_in(module)) == 1
    assert torch.equal(module(x), fn(x))


def test_a_chain_of_views_collapses_to_its_beginning() -> None:
    def fn(x: Tensor) -> Tensor:
        y = aten.expand(aten.view(aten.detach(aten.alias(x)), [2, 3]), [2, 3])
        result: Tensor = aten.sin(y)
        return result

    module = graph_of(fn, torch.randn(2, 3))

    assert dropped(module) == 4
    (sin,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert sin.args[0].op == "placeholder"


def test_a_returned_view_reads_the_beginning_of_its_chain() -> None:
    module = graph_of(lambda x: aten.alias(aten.view(x, [2, 3])), torch.randn(2, 3))

    assert dropped(module) == 1
    assert views_in(module) == [aten.alias.default]
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    assert alias.args[0].op == "placeholder"


def test_strides_that_are_no_standard_ones_may_be_the_same() -> None:
    x = strided(2, 3, stride=(1, 2))
    module = graph_of(lambda x: aten.alias(x) + 1, x)

    assert dropped(module) == 1


def test_a_complex_view_keeps_its_conjugation() -> None:
    x = torch.randn(2, 3, dtype=torch.complex64)

    def fn(x: Tensor) -> Tensor:
        y: Tensor = aten.alias(aten._conj(x)) * 2
        return y

    module = graph_of(fn, x)

    assert dropped(module) == 1
    assert torch.equal(module(x), fn(x))


def alias_that_gives(value: Any) -> fx.GraphModule:
    """alias(x) + 1, where the alias is said to have another value than x: f32[2, 3]."""
    module = graph_of(lambda x: aten.alias(x) + 1, torch.randn(2, 3))
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    alias.meta["val"] = value
    return module


@pytest.mark.parametrize(
    "value",
    [
        strided(2, 3, stride=(1, 2)),
        torch.randn(2, 3, dtype=torch.float64),
        torch._neg_view(torch.randn(2, 3)),
        torch.eye(2, 3).to_sparse(),
        None,
        (torch.randn(2, 3),),
    ],
    ids=["strides", "dtype", "negation", "layout", "unknown", "several"],
)
def test_a_view_that_differs_in_anything_stays(value: Any) -> None:
    assert dropped(alias_that_gives(value)) == 0


def test_a_view_of_the_same_geometry_is_dropped_whatever_its_values() -> None:
    assert dropped(alias_that_gives(torch.zeros(2, 3))) == 1


def test_a_constant_is_read_as_it_is() -> None:
    module = alias_that_gives(torch.randn(2, 3))
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    alias.target = aten.lift_fresh.default  # only functionalization leaves one in a graph

    assert dropped(module) == 1


# Symbolic sizes


def test_a_view_to_the_same_symbolic_size_is_dropped() -> None:
    module = graph_of(lambda x: aten.view(x, x.shape) + 1, torch.randn(4, 6), mode="symbolic")

    assert dropped(module) == 1
    x = torch.randn(7, 5)
    assert torch.equal(module(x), x + 1)


def test_a_view_that_moves_symbolic_sizes_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        rows, columns = x.shape
        y: Tensor = aten.view(x, [columns, rows]) + 1
        return y

    module = graph_of(fn, torch.randn(4, 6), mode="symbolic")

    assert dropped(module) == 0


def test_comparing_symbolic_sizes_adds_no_guard() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return aten.alias(x) + 1, y * 2

    module = graph_of(fn, torch.randn(4, 6), torch.randn(3, 5), mode="symbolic")
    x, y = module.graph.find_nodes(op="placeholder")
    (alias,) = module.graph.find_nodes(op="call_function", target=aten.alias.default)
    alias.meta["val"] = y.meta["val"]  # whether their sizes are equal, nobody has asked yet
    guards = x.meta["val"].size(0).node.shape_env.guards
    before = len(guards)

    assert dropped(module) == 0
    assert len(guards) == before


# In a compilation


def test_a_compiled_function_returns_a_view_and_not_its_input() -> None:
    x = torch.randn(2, 3)

    out = stator.compile(lambda x: x.view(2, 3), strict=True)(x)

    assert out is not x
    assert out.data_ptr() == x.data_ptr()


def test_a_compiled_forward_holds_no_view_that_changes_nothing() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    stator.compile(lambda x: x.view(2, 3).detach().sin() * x.expand(2, 3), strict=True)(x)
    record = stator.last_compilation()

    assert record is not None
    assert not any(f"{target}" in record.graphs["forward"] for target in VIEWS)
    assert any(f"{target}" in record.graphs["joint"] for target in VIEWS)
