"""NumPy's names of arguments become torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.passes.pre_grad.normalize_keywords import normalize_keywords
from tests.parity import check
from tests.passes.pre_grad.test_fuse_attention import captured

X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("program", "keywords"),
    [
        (lambda x: torch.sum(x, axis=1, keepdims=True), {"dim", "keepdim"}),
        (lambda x: torch.amax(input=x, axis=0), {"input", "dim"}),
        (lambda x: x.softmax(axis=-1), {"dim"}),
        (lambda x: torch.add(x, x2=x), {"other"}),
        (lambda x: torch.exp(a=x), {"input"}),
    ],
)
def test_names_become_torchs(program: Callable[[Tensor], Any], keywords: set[str]) -> None:
    module = captured(program, X).module
    normalize_keywords(module.graph, Ctx())
    module.recompile()

    (node,) = [node for node in module.graph.nodes if node.op.startswith("call")]
    assert set(node.kwargs) == keywords
    torch.testing.assert_close(module(X)[0], program(X))
    check(program, X)


def test_names_that_mean_something_else_stay() -> None:
    module = captured(lambda y, x: torch.trapezoid(y, x=x), torch.randn(5), torch.randn(5)).module

    assert normalize_keywords(module.graph, Ctx()) == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([1, 2]), axis=0),
        lambda x: torch.linalg.vander(x=x),
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.ones(3), torch.zeros(3, dtype=torch.int32), axis=0, quant_min=0, quant_max=9
        ),
    ],
)
def test_names_that_are_torchs_own_stay(program: Callable[[Tensor], Any]) -> None:
    module = captured(program, X).module

    assert normalize_keywords(module.graph, Ctx()) == 0
    check(program, X)


def test_without_fuel_nothing_changes() -> None:
    module = captured(lambda x: torch.sum(x, axis=1), X).module

    assert normalize_keywords(module.graph, Ctx(fuel=Fuel(0))) == 0
