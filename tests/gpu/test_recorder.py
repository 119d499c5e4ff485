"""Recordings themselves, of functions that torch runs: memory, random numbers, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.ops import draws
from stator.runtime.cuda_graphs import Pool, Recordable, with_cuda_graphs
from stator.runtime.cuda_recorder import recorder_of
from stator.torch_api import BELOW_AUTOGRAD, below_autograd
from tests.gpu.on_device import needs_card, randn

pytestmark = needs_card

Call = Callable[..., Sequence[Any]]


def card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def recorded(function: Call, pool: Pool | None = None, **facts: Any) -> tuple[Call, Pool]:
    """`function` as a graph whose calls are recorded."""
    pool = pool or Pool(recorder_of(card()))

    def run(arguments: list[Any]) -> Sequence[Any]:
        given = list(arguments)
        arguments.clear()
        return tuple(function(*given))

    replayed = with_cuda_graphs(run, Recordable(card(), **facts), pool, "graph")

    def call(*arguments: Any) -> Sequence[Any]:
        with below_autograd(BELOW_AUTOGRAD):
            return replayed(list(arguments))

    return call, pool


def chain(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = torch.softmax(x @ weight, -1)
    return [y @ weight.t() + x, y.sum()]


def test_replays_compute_what_calls_do() -> None:
    call, pool = recorded(chain)
    weight = randn(64, 32)
    for _ in range(6):
        x = randn(16, 64)
        for ours, eager in zip(call(x, weight), chain(x, weight), strict=True):
            torch.testing.assert_close(ours, eager)

    assert (pool.recorded, pool.replayed, pool.notes) == (1, 5, [])


def test_results_stay_when_others_are_replayed() -> None:
    pool = Pool(recorder_of(card()))
    first, _ = recorded(chain, pool)
    second, _ = recorded(lambda x: [x * 2, x.cumsum(0)], pool)
    weight, given = randn(64, 32), [randn(16, 64) for _ in range(6)]
    found = [(first(x, weight), second(x)) for x in given]

    for x, (one, other) in zip(given, found, strict=True):
        torch.testing.assert_close(one[0], chain(x, weight)[0])
        torch.testing.assert_close(other[1], x.cumsum(0))


def drawn(x: Tensor) -> list[Tensor]:
    seed = draws.draw_seed(x.device)
    return [draws.uniform(seed, 0, (0.0, 1.0), x.shape, x.dtype), torch.rand_like(x)]


def test_replays_draw_the_numbers_of_calls() -> None:
    x = randn(1000)
    torch.cuda.manual_seed(11)
    expected = [drawn(x) for _ in range(6)]
    call, pool = recorded(drawn)
    torch.cuda.manual_seed(11)
    found = [call(x) for _ in range(6)]

    assert pool.replayed == 5
    for ours, eager in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, eager))


def test_numbers_of_a_seed_are_the_same_wherever_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "takes_philox", lambda device: True)  # here as there
    seed = draws.draw_seed()
    for dtype in draws.DIGITS:
        here = draws.uniform(seed, 3, (-1.0, 2.0), (37, 5), dtype)
        there = draws.uniform(seed.to(card()), 3, (-1.0, 2.0), (37, 5), dtype)
        assert torch.equal(here, there.cpu()), dtype


def test_a_recording_that_fails_leaves_torch_as_it_was() -> None:
    call, pool = recorded(lambda x: [x * x.sum().item()])
    x = randn(100)
    for _ in range(4):
        torch.testing.assert_close(call(x)[0], x * x.sum())

    assert pool.recorded == 0
    assert "not recorded any more" in pool.notes[0]
    torch.rand(3, device=card())  # its generator is told that nobody records
    again, other = recorded(drawn)
    for _ in range(3):
        again(x)
    assert other.recorded == 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(20):
        held = torch.empty(1 << 24, device=card())
        held.record_stream(torch.cuda.Stream())  # freed later, by an event: unless one records
        del held
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + (1 << 27)


def test_what_a_forward_keeps_is_there_for_its_backward() -> None:
    pool = Pool(recorder_of(card()))
    forward, _ = recorded(lambda x, w: [(x * w).sum(), x * 2, w * 3], pool, kept=(1, 2))
    backward, _ = recorded(lambda a, b, t: [a * t + b], pool, saved=(0, 1))
    w, tangent = randn(1000), randn(1000)

    def finish(kept: list[Tensor], x: Tensor) -> None:
        first, second = kept
        kept.clear()
        torch.testing.assert_close(backward(first, second, tangent)[0], x * 2 * tangent + w * 3)

    for number in range(8):
        x, y = randn(1000), randn(1000)
        kept = list(forward(x, w)[1:])
        others = list(forward(y, w)[1:]) if number % 2 else []
        if others:
            finish(others, y)
        finish(kept, x)

    assert pool.recorded == 2


def test_replays_on_several_streams() -> None:
    call, _ = recorded(chain)
    weight = randn(64, 32)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(10):
        given, found = [randn(16, 64) for _ in streams], []
        torch.cuda.synchronize()
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
                found.append(call(x, weight)[0])
        torch.cuda.synchronize()
        for x, result in zip(given, found, strict=True):
            torch.testing.assert_close(result, chain(x, weight)[0])


def test_memory_is_given_back_with_the_recordings() -> None:
    weight = randn(1024, 1024)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        call, _ = recorded(lambda x, w: [(x @ w).relu() @ w])
        x = randn(4096, 1024)
        for _ in range(3):
            call(x, weight)
        del call, x
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    assert torch.cuda.memory_reserved() <= before + (64 << 20)  # a library's workspace
