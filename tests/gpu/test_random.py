"""Random numbers: masks that the backward repeats, shares that are right, seeds that are obeyed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import stator
from tests.gpu.on_device import DEVICE, check, compiled, needs_card, randn, several

LONG = (several(3, 1), 20000)  # rows of several blocks


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, training=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_drops_what_the_forward_dropped(dtype: torch.dtype) -> None:
    x = torch.ones(300, 257, device=DEVICE, dtype=dtype, requires_grad=True)

    result = compiled(dropped)(x)
    result.backward(torch.ones_like(result))

    assert x.grad is not None
    assert torch.equal(x.grad == 0, result == 0)
    assert torch.equal(x.grad, result)  # of ones, both are the mask, scaled


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_should_be(share: float) -> None:
    count = 1 << 20
    result = compiled(lambda x: F.dropout(x, share, training=True))(
        torch.ones(count, device=DEVICE)
    )

    deviation = (share * (1 - share) / count) ** 0.5
    assert abs(float((result == 0).double().mean()) - share) < 5 * deviation
    assert torch.allclose(result[result != 0], torch.tensor(1 / (1 - share), device=DEVICE))


def test_masks_are_even_along_both_axes() -> None:
    """No row, column or neighbourhood is favoured."""
    mask = compiled(dropped)(torch.ones(1024, 1024, device=DEVICE)) == 0
    deviation = (0.3 * 0.7 / 1024) ** 0.5

    for dim in (0, 1):
        shares = mask.double().mean(dim)
        assert float((shares - 0.3).abs().max()) < 6 * deviation
    for neighbour in (mask[:, 1:] & mask[:, :-1], mask[1:] & mask[:-1]):
        assert abs(float(neighbour.double().mean()) - 0.09) < 0.002


def test_each_call_draws_anew_and_a_seed_begins_again() -> None:
    drop = compiled(dropped)
    x = torch.ones(1000, device=DEVICE)

    torch.manual_seed(5)
    first, second = drop(x), drop(x)
    torch.manual_seed(5)
    again = drop(x)
    torch.manual_seed(6)
    other = drop(x)

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_two_dropouts_of_one_graph_differ() -> None:
    one, two = compiled(lambda x: (dropped(x), dropped(x)))(torch.ones(1000, device=DEVICE))

    assert not torch.equal(one, two)


def test_a_seed_gives_the_same_training_steps() -> None:
    weight = randn(64, 64)

    def losses() -> list[float]:
        torch.manual_seed(3)
        parameter = weight.clone().requires_grad_()
        step = compiled(lambda w, x: (dropped(x @ w) ** 2).mean())
        x = torch.ones(32, 64, device=DEVICE)
        found = []
        for _ in range(4):
            loss = step(parameter, x)
            (gradient,) = torch.autograd.grad(loss, parameter)
            parameter = (parameter - gradient).detach().requires_grad_()
            found.append(float(loss.detach()))
        return found

    first = losses()
    assert first == losses()
    assert len(set(first)) == len(first)


def test_uniform_and_normal_numbers_have_their_moments() -> None:
    def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x), torch.randn_like(x)

    uniform, normal = compiled(drawn)(torch.empty(1 << 20, device=DEVICE))

    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.002
    assert abs(float(uniform.var()) - 1 / 12) < 0.001
    assert abs(float(normal.mean())) < 0.005
    assert abs(float(normal.std()) - 1) < 0.005
    assert float(normal.abs().max()) > 4


def test_eagers_own_numbers_on_request() -> None:
    """The harness asks for them: `fallback_random`."""
    check(dropped, randn(77, 33, grad=True), seed=11)
    check(lambda x: torch.rand_like(x) + torch.randn_like(x), randn(50), seed=11)


@pytest.mark.parametrize("size", [(4096,), (64, 130), (33, 77), (5, 6, 8), LONG], ids=str)
def test_a_mask_is_the_same_in_every_shape_of_kernel(size: tuple[int, ...]) -> None:
    """Element by element two words come from the same rounds, along rows too; numbers stay."""

    def along_rows(x: Tensor) -> Tensor:
        return dropped(x - x.amax(-1, keepdim=True))

    torch.manual_seed(4)
    flat = compiled(dropped)(torch.ones(size, device=DEVICE))
    torch.manual_seed(4)
    rows = compiled(along_rows)(torch.arange(size[-1], device=DEVICE).float().expand(size) - 2.0)
    torch.manual_seed(4)
    turned = compiled(lambda x: dropped(x.mT.contiguous().mT))(
        torch.ones(size, device=DEVICE) if len(size) > 1 else torch.ones(1, *size, device=DEVICE)
    )

    assert torch.equal(
        rows == 0, (flat == 0) | (torch.arange(size[-1], device=DEVICE) == size[-1] - 1)
    )
    assert torch.equal(turned.reshape(size) == 0, flat == 0)


@needs_card
def test_a_memory_plan_leaves_the_generator_alone() -> None:
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    before = torch.cuda.get_rng_state(DEVICE)

    stator.memory_plan(lambda x: dropped(x).exp(), x)

    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
