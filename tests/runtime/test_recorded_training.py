"""Whole programs whose graphs are recorded, by the recorder without a GPU: they train as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx, nn

from stator import pipeline
from stator.aot.graphs import CompiledGraph
from stator.core.events import last_compilation
from stator.graph.run import Ctx
from stator.runtime import recorded
from stator.runtime.cuda_graphs import Pool
from stator.runtime.plan import Plan
from stator.runtime.recordable import recordable
from stator.runtime.recorded import Recordings
from tests.runtime.recorder import Again


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Pools of the programs that are compiled, all of whose graphs are recorded."""
    found: list[Pool] = []
    plans: list[Plan] = []
    planned, half = pipeline._planned, pipeline.compile_half

    def plan(*args: Any, **options: Any) -> Any:
        made = planned(*args, **options)
        plans.append(made[0])
        return made

    def recorded_half(
        module: fx.GraphModule, name: str, ctx: Ctx, recordings: Recordings
    ) -> CompiledGraph:
        compiled = half(module, name, ctx)
        facts = replace(recordable(module.graph, plans[-1]), reason=None)
        return pipeline._recorded(compiled, facts, recordings, name)

    def new_pool(_: Any, notes: list[str]) -> Pool:
        found.append(Pool(Again(), notes))
        return found[-1]

    monkeypatch.setattr(pipeline, "_planned", plan)
    monkeypatch.setattr(pipeline, "compile_half", recorded_half)
    monkeypatch.setattr(recorded, "Pool", new_pool)
    return found


OPTIONS: Final = {"strict": True, "cache": False, "cuda_graphs": True}


class Net(nn.Module):
    """What keeps values for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of squares, and the values."""
        y: Tensor = self.layers(x)
        return y


def pair(**changed: Any) -> tuple[Net, Net, Callable[..., Tensor]]:
    """A model, its twin, and the twin compiled."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    options = {**OPTIONS, **changed}
    return model, twin, torch.compile(twin, backend="stator", options=options)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_steps_of_training(pools: list[Pool]) -> None:
    model, twin, compiled = pair()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, twin)]
    # Inputs and gradients of all steps are held: one that lay twice at the same address by chance
    # would be taken for one that stays, and recorded once more when the next lies elsewhere.
    inputs = [torch.randn(4, 16) for _ in range(7)]
    held: list[Tensor] = []
    for x in inputs:
        calls: list[Callable[..., Tensor]] = [model, compiled]
        for optimizer, call in zip(optimizers, calls, strict=True):
            optimizer.zero_grad()
            out = call(x)
            out.register_hook(held.append)
            out.square().sum().backward()
            optimizer.step()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours, theirs)

    (pool,) = pools  # of forward and backward
    assert pool.recorded == 2
    assert pool.replayed >= 8


def test_a_program_from_the_cache_is_recorded_anew(pools: list[Pool], tmp_path: Path) -> None:
    for told in ("miss: the cache is empty", "hit"):
        torch._dynamo.reset()
        model, twin, compiled = pair(cache=True, cache_dir=tmp_path)
        for _ in range(5):
            x = torch.randn(4, 16)
            for one, call in ((model, model), (twin, compiled)):
                one.zero_grad()
                call(x).square().sum().backward()
            for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                close(ours.grad, theirs.grad)
        found = last_compilation()
        assert found is not None
        assert found.cache == told

    fresh, loaded = pools
    assert min(fresh.recorded, loaded.recorded) >= 2
    assert loaded.replayed >= 5


def test_gradients_of_two_calls_at_once(pools: list[Pool]) -> None:
    model, twin, compiled = pair()
    for number in range(6):
        first, second = torch.randn(4, 16), torch.randn(4, 16)
        for one, call in ((model, model), (twin, compiled)):
            one.zero_grad()
            outs = [call(first).square().sum(), call(second).sum()]
            for out in outs if number % 2 else reversed(outs):
                out.backward()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours.grad, theirs.grad)

    assert pools[0].replayed > 4


def test_a_graph_that_is_kept_gives_the_same_twice(pools: list[Pool]) -> None:
    model, twin, compiled = pair()
    for _ in range(5):
        x = torch.randn(4, 16)
        for one, call in ((model, model), (twin, compiled)):
            one.zero_grad()
            out = call(x).square().sum()
            out.backward(retain_graph=True)
            out.backward()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def test_calls_without_a_backward_between(pools: list[Pool]) -> None:
    model, twin, compiled = pair()
    for _ in range(5):
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        close(compiled(x), model(x))
        for one, call in ((model, model), (twin, compiled)):
            one.zero_grad()
            call(y).sum().backward()
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            close(ours.grad, theirs.grad)


def test_hooks_that_hold_and_replace_what_is_saved(pools: list[Pool]) -> None:
    model, twin, compiled = pair()
    held: list[Tensor] = []

    def hold(value: Tensor) -> Tensor:
        held.append(value)
        return value

    for pack in (lambda value: value.clone(), hold):
        for _ in range(4):
            x = torch.randn(4, 16)
            for one, call in ((model, model), (twin, compiled)):
                one.zero_grad()
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
                    call(x).square().sum().backward()
            for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                close(ours.grad, theirs.grad)


def test_second_derivatives(pools: list[Pool]) -> None:
    model, _, compiled = pair()
    for _ in range(4):
        x = torch.randn(4, 16, requires_grad=True)
        found = []
        for call in (model, compiled):
            (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), x)[0])
        close(*found)


def test_inference_in_several_sizes(pools: list[Pool]) -> None:
    model, _, _ = pair()
    compiled = torch.compile(model, backend="stator", dynamic=True, options=OPTIONS)
    inputs = [torch.randn(length, 16) for _ in range(4) for length in (3, 5, 7)]  # alive to the end
    with torch.no_grad():
        for x in inputs:
            close(compiled(x), model(x))

    assert pools[0].recorded == 3


def test_results_outlive_later_calls(pools: list[Pool]) -> None:
    model, _, compiled = pair()
    with torch.no_grad():
        given = [torch.randn(4, 16) for _ in range(5)]
        found = [compiled(x) for x in given]
        for x, result in zip(given, found, strict=True):
            close(result, model(x))
