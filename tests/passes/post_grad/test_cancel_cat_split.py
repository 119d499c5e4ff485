"""cat against split: what both undo is not done, unless somebody could tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.cancel_cat_split import cancel_cat_split
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of

aten = torch.ops.aten

Program = Callable[..., Any]


def cancelled(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = cancel_cat_split(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="cancel_cat_split")
    module.recompile()
    return count


def operators(module: fx.GraphModule) -> list[str]:
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [getattr(node.target, "_opname", node.target.__name__) for node in calls]


FIRES: dict[str, tuple[Program, list[str]]] = {
    "slice of cat": (
        lambda a, b: aten.slice(aten.cat([a.sin(), b]), 0, 0, 2).exp(),
        ["sin", "exp"],
    ),
    "the second": (lambda a, b: aten.slice(aten.cat([a, b]), 0, 2, 9).exp(), ["exp"]),
    "in rows": (lambda a, b: aten.slice(aten.cat([a, b], 1), 1, 3, 6).exp(), ["exp"]),
    "split of cat": (
        lambda a, b: (p := torch.cat([a, b]).split(2), p[0].exp() + p[1].cos())[1],
        ["exp", "cos", "add"],
    ),
    "split with sizes of cat": (
        lambda a, b: (p := torch.cat([a, b], 1).split([3, 3], 1), p[0].exp() + p[1].cos())[1],
        ["exp", "cos", "add"],
    ),
    "cat of split": (lambda a, b: torch.cat(a.split([1, 2], 1), 1).exp(), ["exp"]),
    "cat of slices": (lambda a, b: torch.cat([a[:1], a[1:]]).exp(), ["exp"]),
    "cat of cat": (lambda a, b: torch.cat([torch.cat([a, b]), a]), ["cat"]),
    "cat of cat of cat": (
        lambda a, b: torch.cat([b, torch.cat([a, torch.cat([b, a])]), a]),
        ["cat"],
    ),
}

SILENT: dict[str, Program] = {
    "half of one": lambda a, b: aten.slice(aten.cat([a, b]), 0, 0, 1).exp(),
    "across": lambda a, b: aten.slice(aten.cat([a, b]), 0, 1, 3).exp(),
    "other dimension": lambda a, b: aten.slice(aten.cat([a, b]), 1, 0, 2).exp(),
    "every second": lambda a, b: aten.slice(aten.cat([a, b]), 0, 0, 4, 2).exp(),
    "returned": lambda a, b: aten.slice(aten.cat([a, b]), 0, 0, 2),
    "cat returned too": lambda a, b: (c := torch.cat([a, b]), c[:2].view(-1)),
    "promoted": lambda a, b: aten.slice(aten.cat([a, b.double()]), 0, 0, 2).exp(),
    "strides seen": lambda a, b: aten.slice(aten.cat([a, b], 1), 1, 0, 3).t().exp(),
    "other order": lambda a, b: torch.cat(list(reversed(a.split([1, 2], 1))), 1).exp(),
    "not all": lambda a, b: torch.cat(a.split([1, 1, 1], 1)[:2], 1).exp(),
    "gap": lambda a, b: torch.cat([b[:1], b[2:]]).exp(),
    "other dimension of split": lambda a, b: torch.cat(a.split(1, 0), 1).exp(),
    "two sources": lambda a, b: torch.cat([a[:1], b[1:]]).exp(),
    "joined and returned": lambda a, b: torch.cat([a[:1], a[1:]]),
    "joined, view returned": lambda a, b: torch.cat([a[:1], a[1:]]).view(-1),
    "inner cat read": lambda a, b: (c := torch.cat([a, b]), torch.cat([c, a]) * c.sum())[1],
    "inner cat along another": lambda a, b: torch.cat([torch.cat([a, b], 1), torch.cat([a, b], 1)]),
    "rounded in between": lambda a, b: torch.cat(
        [torch.cat([a.double(), a.long()]).float().double(), torch.cat([a, b.long()])]
    ),
    "turned": lambda a, b: torch.cat([a.t()[:1], a.t()[1:]]).exp(),
}


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3), torch.randn(2, 3)


@pytest.mark.parametrize(("fn", "left"), FIRES.values(), ids=FIRES.keys())
def test_what_both_undo_is_not_done(fn: Program, left: list[str]) -> None:
    given = inputs()
    module = graph_of(fn, *given)

    assert cancelled(module) > 0
    module.graph.eliminate_dead_code()
    assert operators(module) == left
    ours, theirs = module(*given), fn(*given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("fn", SILENT.values(), ids=SILENT.keys())
def test_any_other_stays(fn: Program) -> None:
    module = graph_of(fn, *inputs())
    before = str(module.graph)

    assert cancelled(module) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    for fn, _ in FIRES.values():
        module = graph_of(fn, *inputs())
        before = [str(node.format_node()) for node in module.graph.nodes]

        assert cancelled(module, fuel=0) == 0
        assert [str(node.format_node()) for node in module.graph.nodes] == before


def test_before_and_after() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = aten.slice(aten.cat([a, b]), 0, 0, 2) + 1
        return result

    module = graph_of(fn, *inputs())
    assert module.code.strip().splitlines()[1:] == [
        "    cat = torch.ops.aten.cat.default([a_1, b_1]);  a_1 = b_1 = None",
        "    slice_1 = torch.ops.aten.slice.Tensor(cat, 0, 0, 2);  cat = None",
        "    add = torch.ops.aten.add.Tensor(slice_1, 1);  slice_1 = None",
        "    return add",
    ]
    assert cancelled(module) == 1
    assert module.code.strip().splitlines()[1:] == [
        "    add = torch.ops.aten.add.Tensor(a_1, 1);  a_1 = None",
        "    return add",
    ]


def test_an_operand_that_is_written_later_stays_in_the_cat() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        part = aten.slice(aten.cat([a, b]), 0, 0, 2)
        aten.copy_(a, b)
        result: Tensor = part + 1
        return result

    assert cancelled(graph_of(fn, *inputs())) == 0


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        first, second = torch.cat([a, b]).split([a.shape[0], b.shape[0]])
        return first.sum() + second.sum()

    module = graph_of(fn, torch.randn(2, 3), torch.randn(4, 3), mode="symbolic")

    assert cancelled(module) == 2
    a, b = torch.randn(5, 3), torch.randn(6, 3)
    torch.testing.assert_close(module(a, b), fn(a, b))


PROGRAMS: dict[str, Program] = {
    "split of cat": lambda a, b: [p.sin() for p in torch.cat([a, b]).split(2)],
    "split of cat, in rows": lambda a, b: [p.sin() for p in torch.cat([a, b], 1).split(3, 1)],
    "split of cat returned": lambda a, b: torch.cat([a, b]).split(2),
    "cat of split": lambda a, b: torch.cat(a.split([1, 2], 1), 1).sin() * b,
    "cat of split returned": lambda a, b: torch.cat(a.split([1, 2], 1), 1),
    "cat of cat": lambda a, b: torch.cat([torch.cat([a, b]), a.sin()]),
    "cat of chunks": lambda a, b: torch.cat(a.chunk(2, 0)) @ b.t(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled_it_is_eager_s(fn: Program, dynamic: bool) -> None:
    torch.manual_seed(0)
    check(fn, *(given.requires_grad_() for given in inputs()), dynamic=dynamic)
