"""Rules of arithmetic in whole programs: nobody may get other memory by them, or other signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.graph.rules import apply_rules
from stator.graph.run import Ctx
from stator.rules.algebra import ALGEBRA
from tests.parity import check
from tests.rules.tracing import targets, traced

SPECIAL = torch.tensor([1.5, -0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-40])

PROGRAMS: dict[str, Callable[..., Any]] = {
    "neg": lambda x: x.neg().neg(),
    "neg, read": lambda x: x.neg().neg().sin(),
    "neg, as a view": lambda x: x.neg().neg().view(-1),
    "relu": lambda x: x.relu().relu(),
    "abs": lambda x: (-x).abs().abs(),
    "not": lambda x: (x > 0).logical_not().logical_not(),
    "differences": lambda x: (x - (-x), 1 - (-x), x + (-x.sin())),
    "shared": lambda x: (x.neg(), x.neg().neg()),
}


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_compiled_it_is_eager_s(fn: Callable[..., Any]) -> None:
    check(fn, SPECIAL.clone())
    check(fn, torch.randn(2, 3, requires_grad=True))


def test_before_and_after() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.neg().neg().relu().relu() + (-x.abs())

    module = traced(fn, torch.randn(3))
    assert targets(module) == [
        "aten.neg.default",
        "aten.neg.default",
        "aten.relu.default",
        "aten.relu.default",
        "aten.abs.default",
        "aten.neg.default",
        "aten.add.Tensor",
    ]
    assert apply_rules("simplify_algebra", ALGEBRA)(module.graph, Ctx()) == 3
    assert targets(module) == [
        "aten.clone.default",
        "aten.relu.default",
        "aten.abs.default",
        "aten.sub.Tensor",
    ]


def test_what_others_read_is_computed_for_them_all() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        return y, y.relu()

    module = traced(fn, torch.randn(3))
    assert apply_rules("simplify_algebra", ALGEBRA)(module.graph, Ctx()) == 0
