"""Streams, threads and devices: a call works where its caller stands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.on_device import compiled, needs_card, randn

pytestmark = needs_card


def formula(x: Tensor, weight: Tensor) -> Tensor:
    """Kernels and a library's product."""
    return torch.softmax(F.gelu(x @ weight) * 3, -1).sum(0) + 1


def test_a_call_runs_on_the_current_stream() -> None:
    """Inputs come from the stream, behind work that takes long: read too early they are zeros."""
    run = compiled(formula)
    x, weight = randn(256, 128), randn(128, 512)
    expected = run(x, weight).clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    for _ in range(5):
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            result = run(late, weight)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_streams_do_not_share_temporary_memory() -> None:
    run = compiled(formula)
    weight = randn(128, 512)
    inputs = [randn(256, 128) for _ in range(4)]
    expected = [run(x, weight).clone() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()

    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
                results.append(run(x, weight))
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_a_backward_on_another_stream() -> None:
    run = compiled(formula)
    x, weight = randn(64, 128), randn(128, 32, grad=True)
    (expected,) = torch.autograd.grad(formula(x, weight).square().sum(), weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        (gradient,) = torch.autograd.grad(run(x, weight).square().sum(), weight)
    torch.cuda.current_stream().wait_stream(stream)

    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_threads_call_one_program() -> None:
    run = compiled(formula)
    weight = randn(128, 512)
    inputs = [randn(64, 128) for _ in range(8)]
    expected = [run(x, weight).clone() for x in inputs]
    torch.cuda.synchronize()

    def called(x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                result = run(x, weight)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(called, inputs))
    for result, wanted in zip(results, expected, strict=True):
        assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_work_is_only_queued() -> None:
    """A call returns before the device is done."""
    run = compiled(lambda x: (x * 2).relu())
    x = randn(1000)
    run(x)
    done = torch.cuda.Event()
    torch.cuda.synchronize()

    torch.cuda._sleep(200_000_000)  # a tenth of a second
    run(x)
    done.record()

    assert not done.query()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_of_another_device_than_the_current_one() -> None:
    run = compiled(formula)
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        x, weight = torch.randn(64, 128, device=device), torch.randn(128, 32, device=device)

        result = run(x, weight)

        assert result.device == device
        assert torch.cuda.current_device() == 0
        assert torch.allclose(result, formula(x, weight), rtol=1e-4, atol=1e-5)


def test_a_device_that_is_named_by_its_number() -> None:
    run = compiled(formula)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(device):
        x, weight = torch.randn(64, 128, device="cuda"), torch.randn(128, 32, device="cuda")
        assert torch.allclose(run(x, weight), formula(x, weight), rtol=1e-4, atol=1e-5)
