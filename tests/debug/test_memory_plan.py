"""The curve of a model, and that asking for it changes nothing of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    assert {value.layer for value in choices.values} & {"products.0", "norms.0"}
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


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return torch.exp(self.product(x))


def test_a_buffer_that_is_replaced_is_put_back() -> None:
    module = Counting()
    before = module.count

    stator.memory_plan(module, torch.randn(4, 8))

    assert module.count is before
    assert module.count == 0


def test_what_a_function_closes_over_is_left_alone_and_so_are_arguments() -> None:
    module, count = model(), torch.zeros(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def loss(x: Tensor, count: Tensor) -> Tensor:
        count += 1
        return module(x).square().sum() * count.sum()

    stator.memory_plan(loss, torch.randn(256, 32), count)

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not count.any()


def test_a_buffer_that_is_only_read_counts_no_write() -> None:
    module, x = model().eval(), torch.randn(256, 32)
    pending = module(x).sum()  # autograd keeps the statistics

    stator.memory_plan(module, x)

    pending.backward()


def test_it_may_be_asked_for_often_and_of_other_sizes() -> None:
    module = model()
    limit = torch._dynamo.config.recompile_limit

    plans = [stator.memory_plan(module, torch.randn(32 + n, 32)) for n in range(limit + 2)]

    assert all(len(plan.graphs) == 1 for plan in plans)


def test_what_is_asked_for_leaves_no_program_behind() -> None:
    module, x = model(), torch.randn(32, 32)
    stator.memory_plan(module, x)
    seen: list[object] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.compile(module, backend=backend)(x)
    assert len(seen) == 1


def test_without_kernels_it_says_that_there_is_nothing_to_choose() -> None:
    with pytest.raises(OptionError, match="kernels=False"):
        stator.memory_plan(model(), torch.randn(32, 32), options={"kernels": False})


def test_a_program_that_is_not_captured_is_told_from_one_without_gradients() -> None:
    with pytest.raises(OptionError, match="no graph of this program was captured"):
        stator.memory_plan(torch.compiler.disable(model()), torch.randn(32, 32))


def test_a_program_without_gradients_is_refused() -> None:
    with pytest.raises(OptionError, match="needs a gradient"):
        stator.memory_plan(torch.sin, torch.randn(3))
