"""What a call changes: inputs, buffers and views of them, in the order of the program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.on_device import DEVICE, check, compiled, integers, randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_are_written(dtype: torch.dtype) -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        y.copy_(x)
        x[0] = 5
        return x + y

    check(change, randn(33, 65, dtype=dtype), randn(33, 65, dtype=dtype), calls=2)


def test_written_through_views() -> None:
    def change(x: Tensor) -> Tensor:
        x.t()[3].zero_()
        x[::2, 1:].add_(1)
        x.view(-1)[7] = 9
        return x.sum(0)

    check(change, randn(20, 30))


def test_operands_that_overlap() -> None:
    base = randn(100)

    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    check(change, base[:60], base[40:])


def test_written_before_and_after_it_is_read() -> None:
    def change(x: Tensor) -> list[Tensor]:
        before = x * 2
        x.relu_()
        return [before, x + 1, x.sum(-1)]

    check(change, randn(50, 40))


def test_counters_and_averages_of_a_module() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean

    check(Average().to(DEVICE), randn(8, 16), calls=3)


def test_scattered_into_an_input() -> None:
    def change(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        x.index_add_(0, index, values)
        x.index_put_((index[:2],), values[:2])
        return x * 2

    index = torch.randperm(12, device=DEVICE)[:5]
    check(change, randn(12, 7), index, randn(5, 7))


def test_a_cache_of_keys_that_grows_in_place() -> None:
    def step(cache: Tensor, place: Tensor, keys: Tensor) -> Tensor:
        cache.index_copy_(1, place, keys)
        return (cache * keys).sum(-1)

    cache, twin = (torch.zeros(2, 16, 8, device=DEVICE) for _ in range(2))
    run = compiled(step)
    for place in range(10):
        keys = randn(2, 1, 8)
        at = torch.tensor([place], device=DEVICE)
        assert torch.allclose(run(cache, at, keys), step(twin, at, keys), atol=1e-5)
    assert torch.equal(cache, twin)


def test_gradients_of_what_was_changed_in_place() -> None:
    def formula(x: Tensor) -> Tensor:
        y = x * 2
        y[1:].mul_(3)
        y.tanh_()
        return y.sum(-1)

    check(formula, randn(9, 33, grad=True))


def test_results_of_one_call_outlive_the_next() -> None:
    run = compiled(lambda x, i: (x * 2).sum(-1) + i)
    x, i = randn(64, 50), integers(5, 64)

    first = run(x, i)
    kept = first.clone()
    for _ in range(3):
        run(x + 1, i)

    assert torch.equal(first, kept)


def test_what_goes_to_the_host_and_back() -> None:
    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        far = (x * 2).cpu()
        return far + 1, (far.sum() + 1).to(x.device) * x

    check(formula, randn(40))


def test_numbers_that_the_host_reads() -> None:
    def formula(x: Tensor) -> Tensor:
        largest = x.abs().max().item()  # breaks the graph
        return x / largest

    check(formula, randn(100))
