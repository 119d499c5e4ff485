"""The curve of a model, and that asking for it changes nothing of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stator
from stator.errors import OptionError


class Layers(nn.Module):
    """Products, normalised, with activations and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for product, norm in zip(self.products, self.norms, strict=True):
            x = F.gelu(norm(product(x)))
        return F.dropout(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def test_the_curve_has_the_chosen_point() -> None:
    plan = stator.memory_plan(model(), torch.randn(256, 32))

    (choices,) = plan.graphs
    assert choices.chosen in choices.points
    assert choices.chosen.time == pytest.approx(1, abs=0.2)
    assert choices.points[0].peak < choices.chosen.peak
    assert any(value.layer for value in choices.values), "no value knows its layer"
    assert any(value.line for value in choices.values), "no value knows its line"


def test_a_budget_marks_another_point() -> None:
    full = stator.memory_plan(model(), torch.randn(256, 32)).graphs[0]
    small = stator.memory_plan(model(), torch.randn(256, 32), options={"memory_budget": 0.0})

    assert small.graphs[0].chosen.saved < full.chosen.saved


def test_it_is_drawn_and_written(tmp_path: Path) -> None:
    plan = stator.memory_plan(model(), torch.randn(256, 32))

    assert "MiB" in str(plan)
    page = plan.save(tmp_path / "memory.html").read_text(encoding="utf-8")
    assert "<svg" in page


def test_the_users_state_is_left_alone() -> None:
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()

    stator.memory_plan(module, torch.randn(256, 32, generator=torch.Generator().manual_seed(1)))

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_program_without_gradients_is_refused() -> None:
    with pytest.raises(OptionError, match="needs a gradient"):
        stator.memory_plan(torch.sin, torch.randn(3))
