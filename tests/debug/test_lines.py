"""Kernels know the user's lines, in whole models and in both directions."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from stator.debug.explain import watched
from tests.e2e.models import DYNAMO, build

LEAST: Final = 0.95
MODELS: Final = ("gpt2_sdpa", "resnet", "gnn_scatter_reduce", "moe_dense", "recommender")


def explained(name: str) -> dict[str, Any]:
    """A training step of a model."""
    module, inputs = build(name)
    with watched() as seen, torch._dynamo.config.patch(**DYNAMO.get(name, {})):
        compiled = torch.compile(module.train(), backend="stator", options={"explain": True})
        results = torch.utils._pytree.tree_leaves(compiled(*inputs))
        sum(one.sum() for one in results if one.requires_grad).backward()
    return seen.explanation().to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_nearly_all_kernels_have_a_line_outside_of_torch(name: str) -> None:
    halves = [half for graph in explained(name)["graphs"] for half in graph["halves"]]

    assert {half["name"] for half in halves} >= {"forward", "backward"}
    kernels = [kernel for half in halves for kernel in half["kernels"]]
    with_line = [one for one in kernels if one["lines"] and "/torch/" not in one["lines"][0]]
    assert len(kernels) > 5
    assert len(with_line) >= LEAST * len(kernels)


def test_the_lines_of_a_module_of_torchs_own_are_its_callers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    with watched() as seen:
        compiled = torch.compile(module, backend="stator", options={"explain": True})
        compiled(torch.randn(4, 8)).sum().backward()  # this line

    quoted = seen.explanation().to_dict()["sources"]
    assert [line.rpartition(":")[0] for line in quoted] == [__file__]
    assert [text.endswith("# this line") for text in quoted.values()] == [True]
