"""Random numbers: the ones eager would draw, once, and the same again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity import check, compiled

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randn_like": lambda x: torch.randn_like(x) * x,
    "randint_like": lambda x: torch.randint_like(x, 10) + x,
    "rand": lambda x: torch.rand(x.shape) + x,
    "randn": lambda x: torch.randn(3, 4) + x,
    "randint": lambda x: torch.randint(0, 9, (3, 4)) + x,
    "randperm": lambda x: x[torch.randperm(3)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "poisson": lambda x: torch.poisson(x.exp()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1) * x,
    "normal_": lambda x: torch.empty_like(x).normal_() * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_() * x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_drawn_are_those_of_eager(name: str) -> None:
    flat = name in ("poisson", "bernoulli_p")  # steps: gradients say nothing about the draw
    check(DRAWS[name], torch.randn(3, 4, requires_grad=not flat), seed=5)


def test_the_generator_is_left_where_eager_leaves_it() -> None:
    def next_number(call: Callable[..., Any]) -> float:
        torch.manual_seed(2)
        call(torch.ones(5))
        return float(torch.rand(()))

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.randn_like(x)

    assert next_number(compiled(fn)) == next_number(fn)


def test_two_calls_draw_different_numbers() -> None:
    call = compiled(lambda x: torch.rand_like(x) + x)
    assert not torch.equal(call(torch.zeros(8)), call(torch.zeros(8)))


def test_the_same_seed_draws_the_same_numbers() -> None:
    call = compiled(lambda x: torch.rand_like(x) + x)
    torch.manual_seed(7)
    first = call(torch.zeros(8))
    torch.manual_seed(7)
    assert torch.equal(first, call(torch.zeros(8)))


def test_two_draws_in_one_graph_differ() -> None:
    first, second = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.zeros(8))
    assert not torch.equal(first, second)


def test_backward_of_dropout_uses_the_mask_of_forward() -> None:
    x = torch.ones(100, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5))(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_backward_of_drawn_noise_uses_the_same_noise() -> None:
    x = torch.ones(10, requires_grad=True)
    out = compiled(lambda x: torch.randn_like(x) * x)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_backward_draws_nothing() -> None:
    x = torch.ones(10, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5))(x).sum()
    state = torch.get_rng_state()
    out.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_two_forwards_before_two_backwards_keep_their_own_masks() -> None:
    call = compiled(lambda x: F.dropout(x, 0.5))
    x, y = torch.ones(50, requires_grad=True), torch.ones(50, requires_grad=True)
    first, second = call(x), call(y)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(x.grad, first)
    assert torch.equal(y.grad, second)


def test_a_second_backward_over_a_retained_graph_uses_the_same_mask() -> None:
    x = torch.ones(50, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5))(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first, second)


def test_double_backward_through_dropout_uses_the_same_mask() -> None:
    x = torch.full((50,), 2.0, requires_grad=True)
    out = compiled(lambda x: F.dropout(x * x, 0.5))(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second != 0, out != 0)


def test_dropout_in_eval_draws_nothing() -> None:
    check(nn.Dropout(0.5).eval(), torch.randn(8, requires_grad=True), expect_graph=False)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything_are_as_in_eager(p: float) -> None:
    check(lambda x: F.dropout(x, p) * 2, torch.randn(8, requires_grad=True), seed=0)


def test_an_input_is_filled_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        x.uniform_()
        return x * 2

    check(fn, torch.zeros(8), seed=1)


def test_a_graph_without_random_numbers_leaves_the_generator_alone() -> None:
    check(lambda x: x.sin() * 2, torch.randn(3, requires_grad=True))


def test_a_transformer_layer_with_dropout_trains_as_eager_does() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    check(layer, torch.randn(2, 5, 8, requires_grad=True), seed=4)


def test_attention_with_dropout_trains_as_eager_does() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in "qkv")

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    check(fn, query, key, value, seed=4)


def test_a_seed_set_between_calls_is_obeyed() -> None:
    call = compiled(lambda x: torch.rand_like(x) + x)
    call(torch.zeros(4))
    torch.manual_seed(11)
    ours = call(torch.zeros(4))
    torch.manual_seed(11)
    assert torch.equal(ours, torch.rand(4))


def test_a_generator_of_the_users_own_is_drawn_from() -> None:
    def fn(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(4, generator=generator)

    ours = compiled(fn)(torch.zeros(4), torch.Generator().manual_seed(3))
    assert torch.equal(ours, torch.rand(4, generator=torch.Generator().manual_seed(3)))
