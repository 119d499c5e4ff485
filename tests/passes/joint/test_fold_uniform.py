"""One number everywhere becomes `full`; neutral operands vanish, unless that could be told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint.fold_uniform import fold_uniform
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of

aten = torch.ops.aten

Program = Callable[..., Any]


def folded(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = fold_uniform(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="fold_uniform")
    module.recompile()
    return count


def calls(module: fx.GraphModule) -> list[str]:
    return [
        f"{node.target}{node.args}".replace("aten.", "").replace("torch.", "")
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


X = torch.tensor([[1.5, -0.0, math.nan], [math.inf, -2.0, 1e-40]])
N = torch.arange(6).view(2, 3)

UNIFORM: dict[str, tuple[Program, Tensor, list[str]]] = {
    "like": (lambda x: aten.ones_like(x), X, ["full.default([2, 3], 1.0)"]),
    "zeros": (lambda x: x + aten.zeros_like(x), X, ["full.default([2, 3], 0.0)", "add"]),
    "full": (lambda x: aten.full_like(x, 2), X, ["full.default([2, 3], 2.0)"]),
    "new": (lambda x: aten.new_full(x, [4], 7), X, ["full.default([4], 7.0)"]),
    "sum of two": (lambda x: aten.ones_like(x) + 2, X, ["full.default([2, 3], 3.0)"]),
    "chain": (lambda x: aten.exp(aten.zeros_like(x)) * 3 - 1, X, ["full.default([2, 3], 2.0)"]),
    "comparison": (lambda x: aten.ones_like(x) > 0, X, ["full.default([2, 3], True)"]),
    "cast": (lambda x: aten.ones_like(x).to(torch.int32), X, ["full.default([2, 3], 1)"]),
    "rounded": (
        lambda x: aten.full_like(x, 0.1).to(torch.bfloat16),
        X,
        ["full.default([2, 3], 0.10009765625)"],
    ),
    "expanded, read": (
        lambda x: x + (aten.ones([1, 3]) * 2).expand(2, 3),
        X,
        ["full.default([1, 3], 2.0)", "expand", "add"],
    ),
    "expanded, computed": (
        lambda x: x + (aten.ones([1, 3]).expand(2, 3) * 2),
        X,
        ["full.default([2, 3], 2.0)", "add"],
    ),
    "view": (lambda x: x + aten.ones([6]).view(2, 3), X, ["full.default([2, 3], 1.0)", "add"]),
    "int times 0": (lambda x: x * 0, N, ["full.default([2, 3], 0)"]),
    "int times zeros": (lambda x: x * aten.zeros_like(x), N, ["full.default([2, 3], 0)"]),
    "where of two": (
        lambda x: aten.where(aten.ones_like(x) > 0, aten.zeros_like(x), aten.ones_like(x)),
        X,
        ["full.default([2, 3], 0.0)"],
    ),
}


@pytest.mark.parametrize(("fn", "x", "expected"), UNIFORM.values(), ids=UNIFORM.keys())
def test_one_number_everywhere_is_full(fn: Program, x: Tensor, expected: list[str]) -> None:
    module = graph_of(fn, x)

    assert folded(module) > 0
    found = calls(module)
    assert len(found) == len(expected)
    assert all(one.startswith(wanted) for one, wanted in zip(found, expected, strict=True))
    ours, theirs = module(x), fn(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours.stride() == theirs.stride()


# What remains of each is its operand, in the right type.
NEUTRAL: dict[str, tuple[Program, Tensor]] = {
    "float minus 0": (lambda x: (x - 0).sin(), X),
    "float minus 0.0": (lambda x: (x - 0.0).sin(), X),
    "float plus -0.0": (lambda x: (x + -0.0).sin(), X),
    "-0.0 plus float": (lambda x: (aten.full_like(x, -0.0) + x).sin(), X),
    "float times 1": (lambda x: (x * 1).sin(), X),
    "1 times float": (lambda x: (aten.ones_like(x) * x).sin(), X),
    "float by 1": (lambda x: (x / 1.0).sin(), X),
    "float minus zeros": (lambda x: (x - aten.zeros([3])).sin(), X),
    "int plus 0": (lambda x: (x + 0).sin(), N),
    "int minus 0": (lambda x: (x - 0).sin(), N),
    "int times 1": (lambda x: (x * 1).sin(), N),
    "int by 1, promoted": (lambda x: (x / 1).sin(), N),
    "int times 1.0, promoted": (lambda x: (x * 1.0).sin(), N),
    "int minus 0.0, promoted": (lambda x: (x - 0.0).sin(), N),
    "bool times 1, promoted": (lambda x: (x * 1).sin(), N > 2),
    "half times ones, promoted": (lambda x: (x * aten.ones([3])).sin(), X.bfloat16()),
    "promoted and returned": (lambda x: x * 1.0, N),
}


@pytest.mark.parametrize(("fn", "x"), NEUTRAL.values(), ids=NEUTRAL.keys())
def test_a_neutral_operand_vanishes(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)

    assert folded(module) == 1
    assert not any(name in str(module.graph) for name in ("add.", "sub.", "mul.", "div.", "full"))
    ours, theirs = module(x), fn(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(ours), torch.signbit(theirs))


SILENT: dict[str, tuple[Program, Tensor]] = {
    "float plus 0": (lambda x: (x + 0).sin(), X),  # -0.0 would stay negative
    "float plus 0.0": (lambda x: (x + 0.0).sin(), X),
    "float minus -0.0": (lambda x: (x - -0.0).sin(), X),
    "0 minus float": (lambda x: aten.full([], 0.0) - x, X),
    "1 by float": (lambda x: aten.full([], 1.0) / x, X),
    "float times 0": (lambda x: x * 0, X),  # NaN and infinity stay
    "times 2": (lambda x: (x * 2).sin(), X),
    "rounded down": (lambda x: aten.div(x, 1, rounding_mode="floor").sin(), X),
    "with alpha": (lambda x: aten.sub.Tensor(x, aten.full([], 0.0), alpha=2).sin(), X),
    "returned": (lambda x: x * 1, X),
    "view returned": (lambda x: (x * 1).view(-1), X),
    "widened": (lambda x: (x * aten.full([2, 2, 3], 1.0)).sin(), X),
    "other strides": (lambda x: aten.mul(aten.expand(x, [2, 3]), 1).sin(), X[0]),
    "complex": (lambda x: (x * 1).sin(), torch.tensor([complex(math.inf, 0)])),
    "random": (lambda x: aten.bernoulli(aten.full([3], 0.5)), X),
    "full": (lambda x: aten.full([2], 3.0) + aten.sin(x[:, 0]), X),
    "nothing known": (lambda x: x.sin() + 1, X),
    "to whole numbers": (lambda x: aten.full([3], math.nan).to(torch.int64), X),
    "division by zero": (lambda x: aten.full([3], 1) // aten.full([3], 0), X),
}


@pytest.mark.parametrize(("fn", "x"), SILENT.values(), ids=SILENT.keys())
def test_anything_else_stays(fn: Program, x: Tensor) -> None:
    module = graph_of(fn, x)
    before = str(module.graph)

    assert folded(module) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    for fn, x in [*((fn, x) for fn, x, _ in UNIFORM.values()), *NEUTRAL.values()]:
        module = graph_of(fn, x)
        before = str(module.graph)

        assert folded(module, fuel=0) == 0
        assert str(module.graph) == before


def test_before_and_after() -> None:
    def fn(x: Tensor) -> Tensor:
        ones = aten.ones_like(x)
        result: Tensor = x * ones - aten.expand(aten.mul(ones, 3.0), [4, 2, 3])
        return result

    module = graph_of(fn, X)
    assert calls(module) == [
        "ones_like.default(x_1,)",
        "mul.Tensor(x_1, ones_like)",
        "mul.Tensor(ones_like, 3.0)",
        "expand.default(mul_1, [4, 2, 3])",
        "sub.Tensor(mul, expand)",
    ]
    assert folded(module) == 2
    assert calls(module) == [
        "full.default([2, 3], 3.0)",
        "expand.default(full_default_1, [4, 2, 3])",
        "sub.Tensor(x_1, expand)",
    ]


def test_a_number_that_is_written_over_is_none() -> None:
    def fn(x: Tensor) -> Tensor:
        buffer = aten.zeros_like(x)
        aten.copy_(buffer, x)
        result: Tensor = buffer * 2
        return result

    module = graph_of(fn, X)
    assert folded_unverified(module) == 0


def folded_unverified(module: fx.GraphModule) -> int:
    return fold_uniform(module.graph, Ctx())


def test_the_old_value_of_an_input_stays_its_own() -> None:
    def fn(x: Tensor) -> Tensor:
        old = x * 1
        aten.copy_(x, x.sin())
        result: Tensor = old.cos()
        return result

    assert folded(graph_of(fn, X)) == 0


def test_symbolic_sizes_are_read_where_they_are_known() -> None:
    def fn(x: Tensor) -> Tensor:
        rows = x.shape[0]
        result: Tensor = x[:, 0].contiguous() + (torch.ones(rows) * 3 + 1)
        return result

    x = torch.randn(4, 6)
    module = graph_of(fn, x, mode="symbolic")

    assert folded(module) == 1
    assert any("full.default([sym_size" in call for call in calls(module))
    x = torch.randn(7, 5)
    assert torch.equal(module(x), fn(x))


def test_a_view_and_its_source_stay_one_memory() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.ones([6])
        return y, aten.view(y, [2, 3])

    assert folded(graph_of(fn, X)) == 0


PROGRAMS: dict[str, Program] = {
    "sum of zeros": lambda x: x.sin() + torch.zeros_like(x) + torch.ones(3),
    "scale by 1": lambda x: (x * 1.0 - 0.0) / 1,
    "plus 0": lambda x: x + 0.0,
    "mask of ones": lambda x: x.masked_fill(torch.zeros_like(x) > 1, -math.inf).softmax(-1),
    "only a number": lambda x: torch.ones_like(x) * 3,
    "both": lambda x: (torch.ones_like(x), torch.ones_like(x).view(-1), x * 1),
    "times int zero": lambda x: x.argsort() * 0 + 1,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled_it_is_eager_s(fn: Program, dynamic: bool) -> None:
    check(fn, torch.randn(4, 3, requires_grad=True), dynamic=dynamic)
    check(fn, torch.tensor([[-0.0, 1.0, 2.0]]), dynamic=dynamic)
