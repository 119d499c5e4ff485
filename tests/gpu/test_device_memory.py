"""Memory of the device: calls leave nothing behind, and a step holds no more than eager's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.e2e.handwritten_models import ResNet, TransformerBlock
from tests.gpu.on_device import DEVICE, compiled, needs_card, randn

pytestmark = needs_card

MARGIN = 1.05
SMALL = 1 << 20  # bytes: seeds, counters, rounding of the allocator


def held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def peak(call: Callable[[], Any]) -> int:
    """Bytes beyond those held before."""
    before = held()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def infer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(F.gelu(x @ weight), -1)


def test_inference_keeps_nothing() -> None:
    run = compiled(infer)
    x, weight = randn(512, 256), randn(256, 1024)
    for _ in range(10):
        run(x, weight)
    before = held()

    for _ in range(200):
        run(x, weight)

    assert held() <= before


def test_training_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).to(
        DEVICE
    )
    run = compiled(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(randn(128, 64)).square().mean().backward()

    for _ in range(10):
        step()
    before, reserved = held(), torch.cuda.memory_reserved()

    for _ in range(200):
        step()

    assert held() <= before
    assert torch.cuda.memory_reserved() <= reserved


def test_sizes_that_vary_keep_nothing() -> None:
    run = compiled(infer, dynamic=True)
    weight = randn(256, 512)
    for rows in range(2, 60):
        run(randn(rows, 256), weight)
    before = held()

    for _ in range(3):
        for rows in range(2, 60):
            run(randn(rows, 256), weight)

    assert held() <= before


def test_a_program_that_is_dropped_gives_its_memory_back() -> None:
    x, weight = randn(512, 256), randn(256, 1024)
    infer(x, weight)  # the library's workspace stays
    before = held()

    run = compiled(infer)
    run(x, weight)
    del run
    torch._dynamo.reset()

    assert held() <= before + SMALL


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_a_step_holds_no_more_than_eagers(name: str, train: bool) -> None:
    if name == "transformer":
        model, x = TransformerBlock(256).to(DEVICE), randn(16, 256, 256)
    else:
        model, x = ResNet(32).to(DEVICE), randn(16, 3, 128, 128)
    model.train(train)

    def step(run: Callable[..., Any]) -> None:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            output = run(x)
            loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        if train:
            loss.backward()

    compiled_model = compiled(model)
    for run in (model, compiled_model):
        step(run)  # libraries take their workspaces, the compiler its time
        step(run)
    model.zero_grad(set_to_none=True)
    eager = peak(lambda: step(model))
    model.zero_grad(set_to_none=True)

    assert peak(lambda: step(compiled_model)) <= MARGIN * eager + SMALL
