"""Budgets and limits of a training step: what they change, what they leave, and that they hold."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stator
from stator.aot.partition.choose import LEVEL
from stator.errors import MemoryLimitError
from tests.e2e.test_memory import live_bytes
from tests.parity import compiled

BUDGETS: Final = (1.0, 0.7, 0.4, 0.2, 0.0)
CLOSE: Final = 0.05  # of what is predicted


class Layers(nn.Module):
    """Residual layers with a product, an activation and dropout, and a loss behind them."""

    def __init__(self, depth: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.gelu(layer(norm(x))), self.dropout, self.training)
        return x.square().mean()


def gradients(call: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    module.zero_grad(set_to_none=True)
    call(x).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def built(dropout: float = 0.0) -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    return Layers(6, 64, dropout), torch.randn(2048, 64)


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_are_eagers_at_every_budget(budget: float) -> None:
    module, x = built()
    expected = gradients(module, module, x)

    found = gradients(compiled(module, options={"memory_budget": budget}), module, x)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_dropout_that_is_drawn_again_gives_the_same_mask() -> None:
    module, x = built(dropout=0.5)
    saved = gradients(compiled(module, options={"memory_budget": 1.0}), module, x)
    torch._dynamo.reset()

    again = gradients(compiled(module, options={"memory_budget": 0.0}), module, x)

    torch.testing.assert_close(again, saved, rtol=1e-4, atol=1e-6)
    assert any(grad.abs().sum() > 0 for grad in again)


def measured(budget: float) -> tuple[int, int]:
    """What a step was foreseen to hold beyond its inputs, and what it held."""
    torch._dynamo.reset()
    module, x = built()
    call = compiled(module, fullgraph=True, options={"memory_budget": budget})

    def step() -> None:
        call(x).backward()
        module.zero_grad(set_to_none=True)

    step()
    record = stator.last_compilation()
    assert record is not None
    assert record.step_peak is not None
    step()
    gc.collect()
    stator.trim()
    torchs, _ = live_bytes(step)
    held = stator.memory()
    return record.step_peak - record.inputs, torchs + held.peak + held.arenas


def test_the_peak_is_as_foreseen_and_falls_with_the_budget() -> None:
    found = [measured(budget) for budget in BUDGETS]

    for budget, (foreseen, held) in zip(BUDGETS, found, strict=True):
        assert abs(held - foreseen) <= CLOSE * foreseen, f"budget {budget}: {held}, not {foreseen}"
    peaks = [held for _, held in found]
    for more, less in pairwise(peaks):
        assert less <= more * (1 + CLOSE), f"peaks by falling budget: {peaks}"
    assert peaks[-1] < 0.7 * peaks[0], f"budgets change little: {peaks}"


SMALL: Final = {  # of which plans of both ends of a row are made
    "pooled": lambda: (pooled(4, 32), torch.randn(16, 32, 1024)),  # large buffers
    # Where a step is of buffers that are small, and weights count as much:
    "products": lambda: (products(6, 256), torch.randn(64, 256)),
    "convolutions": lambda: (convolutions(4, 8), torch.randn(2, 3, 16, 16)),
}


def products(depth: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh()))
    )


def convolutions(depth: int, channels: int) -> nn.Module:
    sizes = [3, *[channels] * depth]
    parts = [(nn.Conv2d(*pair, 3), nn.BatchNorm2d(channels), nn.ReLU()) for pair in pairwise(sizes)]
    return nn.Sequential(*(part for layer in parts for part in layer))


def pooled(depth: int, channels: int) -> nn.Module:
    """Kernels of these layers store over other values than the simulation thinks."""
    groups = (1, channels, channels // 8, 1)[:depth]
    parts = [
        (
            nn.Conv1d(channels, channels, 5, padding=2, groups=group),
            nn.BatchNorm1d(channels),
            nn.LeakyReLU(),
            nn.MaxPool1d(2),
        )
        for group in groups
    ]
    return nn.Sequential(*(part for layer in parts for part in layer))


def normed(depth: int, width: int) -> nn.Module:
    parts = [(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU()) for _ in range(depth)]
    return nn.Sequential(*(part for layer in parts for part in layer))


TINY: Final = {  # where nearly all of a step is in arenas, which plans alone know
    "norms": lambda: (normed(4, 24), torch.randn(33, 24)),
    "products": lambda: (products(3, 16), torch.randn(8, 16)),
}


@pytest.mark.parametrize("name", SMALL)
def test_less_budget_takes_no_more_in_small_models(name: str) -> None:
    peaks = peaks_along_budgets(*SMALL[name]())

    for more, less in pairwise(peaks):
        assert less <= more * LEVEL, f"peaks by falling budget: {peaks}"


@pytest.mark.parametrize("name", TINY)
def test_of_two_budgets_in_tiny_models_the_smaller_takes_no_more(name: str) -> None:
    """Without a budget, such a step may hold less than whatever keeps less of its forward."""
    _, *peaks = peaks_along_budgets(*TINY[name]())

    for more, less in pairwise(peaks):
        assert less <= more * LEVEL, f"peaks by falling budget: {peaks}"


def peaks_along_budgets(module: nn.Module, x: Tensor) -> list[int]:
    torch.manual_seed(0)
    peaks = []
    for budget in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        torch._dynamo.reset()
        gradients(lambda x, b=budget: at(b, module)(x).square().mean(), module, x)
        record = stator.last_compilation()
        assert record is not None
        assert record.step_peak is not None
        peaks.append(record.step_peak)
    return peaks


def at(budget: float, module: nn.Module) -> Any:
    return compiled(module, fullgraph=True, options={"memory_budget": budget})


def test_a_limit_holds() -> None:
    module, x = built()
    usual = compiled(module, fullgraph=True)
    usual(x).backward()
    record = stator.last_compilation()
    assert record is not None
    assert record.step_peak is not None
    limit = int(0.8 * record.step_peak)
    torch._dynamo.reset()

    gradients(compiled(module, fullgraph=True, options={"memory_limit": limit}), module, x)

    record = stator.last_compilation()
    assert record is not None
    assert record.step_peak is not None
    assert record.step_peak <= limit


def test_a_step_from_the_cache_is_foreseen_as_it_was(tmp_path: Path) -> None:
    module, x = built()
    options = {"cache": True, "cache_dir": str(tmp_path), "memory_budget": 0.5}
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled(module, fullgraph=True, options=options)(x).backward()
        record = stator.last_compilation()
        assert record is not None
        found.append((record.cache or "", record.step_peak))

    (first, peak), (second, again) = found
    assert first.startswith("miss")
    assert second == "hit"
    assert peak is not None
    assert again == peak


def test_a_limit_that_cannot_be_met_says_what_can() -> None:
    module, x = built()
    call = compiled(module, fullgraph=True, options={"memory_limit": "1MiB"})

    with pytest.raises(Exception, match="a step takes at least") as caught:
        call(x)

    assert MemoryLimitError.__name__ in str(caught.value)
    assert "memory_limit is 1048576 bytes" in str(caught.value)


def test_a_policy_decides_what_is_saved() -> None:
    module, x = built()
    expected = gradients(module, module, x)
    asked: set[str] = set()

    def policy(node: torch.fx.Node) -> str | None:
        asked.add(getattr(node.target, "__name__", ""))
        return "recompute" if "addmm" in str(node.target) else None

    found = gradients(compiled(module, options={"save_policy": policy}), module, x)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert "addmm.default" in asked


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    reason="this torch has no annotation of budgets",
)
def test_torchs_annotation_of_a_region_is_a_budget() -> None:
    module, x = built()

    def annotated(x: Tensor) -> Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return module(x)

    def peak(program: Any, **options: Any) -> int:
        gradients(compiled(program, fullgraph=True, options=options), module, x)
        record = stator.last_compilation()
        assert record is not None
        assert record.step_peak is not None
        return record.step_peak

    assert peak(annotated) == peak(module, memory_budget=0.0) < peak(module)
