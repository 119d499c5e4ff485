"""`mode="reduce-overhead"`: replays see new inputs, weights, sizes and random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stator.core.events import last_compilation
from tests.gpu.on_device import DEVICE, compiled, needs_card, randn

pytestmark = needs_card

MODE = "reduce-overhead"


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(F.gelu(x @ weight), -1) + x.sum()


def is_near(ours: Tensor, eager: Tensor) -> bool:
    return bool(torch.allclose(ours, eager, rtol=1e-3, atol=1e-4))


def test_replays_read_new_inputs() -> None:
    run = compiled(formula, mode=MODE)
    weight = randn(64, 32)

    for _ in range(8):
        x = randn(16, 64)  # elsewhere in memory every time
        with torch.no_grad():
            assert is_near(run(x, weight), formula(x, weight))


def test_inputs_that_stay_in_their_place_may_change() -> None:
    run = compiled(formula, mode=MODE)
    x, weight = randn(16, 64), randn(64, 32)

    for _ in range(6):
        x.normal_()
        weight.mul_(0.9)
        assert is_near(run(x, weight), formula(x, weight))


def test_new_sizes_are_recorded() -> None:
    run = compiled(formula, mode=MODE, dynamic=True)
    weight = randn(64, 32)

    for rows in (4, 16, 4, 100, 16, 7, 4):
        x = randn(rows, 64)
        assert is_near(run(x, weight), formula(x, weight)), rows


def test_programs_from_the_cache_are_recorded(tmp_path: Path) -> None:
    weight = randn(64, 32, grad=True)

    for told in ("miss: the cache is empty", "hit"):
        torch._dynamo.reset()
        run = compiled(formula, mode=MODE, cache=True, cache_dir=tmp_path)
        for _ in range(6):
            x = randn(16, 64)
            found, wanted = run(x, weight), formula(x, weight)
            assert is_near(found, wanted)
            ours, eager = (torch.autograd.grad(y.sum(), weight)[0] for y in (found, wanted))
            assert is_near(ours, eager)
        record = last_compilation()
        assert record is not None
        assert record.cache == told


def test_many_sizes_stay_right() -> None:
    """More than are worth recording."""
    run = compiled(formula, mode=MODE, dynamic=True)
    weight = randn(64, 32)

    for rows in [*range(2, 40), 3, 39]:
        x = randn(rows, 64)
        assert is_near(run(x, weight), formula(x, weight)), rows


def test_results_that_were_copied_stay() -> None:
    run = compiled(formula, mode=MODE)
    weight = randn(64, 32)
    inputs = [randn(16, 64) for _ in range(5)]
    results = []
    for x in inputs:
        torch.compiler.cudagraph_mark_step_begin()
        results.append(run(x, weight).clone())

    for x, result in zip(inputs, results, strict=True):
        assert is_near(result, formula(x, weight))


def test_training_follows_eager() -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 5)).to(
            DEVICE
        )

    def losses(model: nn.Module, run: nn.Module) -> list[float]:
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(8):
            x, target = randn(32, 20), torch.randint(5, (32,), device=DEVICE)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(run(x), target)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    eager, ours = network(), network()
    run = compiled(ours, mode=MODE)
    assert losses(ours, run) == pytest.approx(losses(eager, eager), rel=1e-3)
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert is_near(mine, theirs)


def test_gradients_add_up() -> None:
    model = nn.Linear(8, 8).to(DEVICE)
    run = compiled(model, mode=MODE)
    total = torch.zeros_like(model.weight)

    for _ in range(5):
        x = randn(4, 8)
        run(x).sum().backward()
        total += x.sum(0)

    assert is_near(model.weight.grad, total)


def test_inputs_are_written() -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2

    run = compiled(change, mode=MODE)
    x, y = randn(100), randn(100)
    for _ in range(5):
        before = x.clone()
        result = run(x, y)
        assert is_near(x, before + y)
        assert is_near(result, 2 * (before + y))


def test_replays_draw_new_random_numbers() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5, training=True), mode=MODE)
    x = torch.ones(1000, device=DEVICE)

    masks = [run(x).clone() for _ in range(6)]

    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    assert all(abs(float((mask == 0).float().mean()) - 0.5) < 0.1 for mask in masks)


def test_a_seed_is_obeyed_by_replays() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5, training=True), mode=MODE)
    x = torch.ones(1000, device=DEVICE)
    for _ in range(3):
        run(x)

    torch.manual_seed(4)
    first = run(x).clone()
    torch.manual_seed(4)

    assert torch.equal(run(x), first)


def test_masks_of_forward_and_backward_agree_in_replays() -> None:
    run = compiled(lambda x: F.dropout(x * 1, 0.5, training=True), mode=MODE)

    for _ in range(5):
        x = torch.ones(500, device=DEVICE, requires_grad=True)
        result = run(x)
        kept = result.detach().clone()
        result.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, kept)


def test_scalars_from_the_host_are_not_frozen() -> None:
    run = compiled(lambda x, scale: (x * scale).relu(), mode=MODE)
    x = randn(50)

    for number in (2.0, 3.0, 5.0, 7.0):
        assert is_near(run(x, torch.tensor(number)), (x * number).relu())


def test_two_programs_called_in_turn() -> None:
    first, second = compiled(formula, mode=MODE), compiled(lambda x: x.tanh() * 2, mode=MODE)
    weight = randn(64, 32)

    for _ in range(6):
        x = randn(16, 64)
        inner = first(x, weight)
        assert is_near(inner, formula(x, weight))
        assert is_near(second(inner), formula(x, weight).tanh() * 2)


def test_on_another_stream() -> None:
    run = compiled(formula, mode=MODE)
    weight = randn(64, 32)
    stream = torch.cuda.Stream()
    for _ in range(5):
        x = randn(16, 64)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = run(x, weight)
        torch.cuda.current_stream().wait_stream(stream)
        assert is_near(result, formula(x, weight))


def test_memory_does_not_grow() -> None:
    run = compiled(formula, mode=MODE)
    x, weight = randn(256, 64), randn(64, 512)
    for _ in range(10):
        run(x, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()

    for _ in range(100):
        run(x, weight)
    torch.cuda.synchronize()

    assert torch.cuda.memory_reserved() <= before
