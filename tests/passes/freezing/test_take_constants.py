"""What leaves a graph as a constant, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stator
from stator.passes.freezing.take_constants import take_constants
from tests.passes.freezing.graphs import run_with_constants, with_weights

X, W, B = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w.t())


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b * 2, x, (w * b[:, None].exp()).t())


def of_the_input(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x @ x.t()).sum() + w.sum()


def returned(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w.t(), w * 2


def part_of_several(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    values, indices = w.sort(dim=0)
    return x + values.sum(0) + indices[0]


def grown(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w.repeat(2000, 100).sum() + x


def random(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x + torch.rand_like(w).sum()


@pytest.mark.parametrize("fn", [linear, scaled, of_the_input, returned, part_of_several, grown])
def test_the_graph_with_its_constants_computes_the_same(fn: Callable[..., Any]) -> None:
    module = with_weights(fn, (X, W, B), (1, 2))
    expected = fn(X, W, B)
    found, _ = run_with_constants(module, (X, W, B))

    torch.testing.assert_close(
        list(found), [expected] if isinstance(expected, Tensor) else list(expected)
    )


def recipes_of(fn: Callable[..., Any], *, frozen: bool = True) -> list[str]:
    graph = with_weights(fn, (X, W, B), (1, 2)).graph
    return [recipe.text for recipe in take_constants(graph, frozen=frozen).recipes]


def test_a_frozen_weight_is_a_constant_itself() -> None:
    assert recipes_of(linear) == ["", "aten.t.default((Weight(number=0),), {})"]


def test_arithmetic_of_weights_is_one_recipe() -> None:
    constants = take_constants(with_weights(scaled, (X, W, B), (1, 2)).graph, frozen=True)
    assert sorted(recipe.weights for recipe in constants.recipes) == [(1, 2), (2,)]
    assert constants.arguments == (0,)


def test_without_freezing_only_what_is_packed_is_taken() -> None:
    assert recipes_of(scaled, frozen=False) == []


def test_what_the_caller_gets_is_made_at_every_call() -> None:
    """It may write to it."""
    constants = take_constants(with_weights(returned, (X, W, B), (1, 2)).graph, frozen=True)
    assert all("mul" not in recipe.text for recipe in constants.recipes)


def viewed(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return x + 1, (w * 2).view(-1)[3:]


def unsafely_viewed(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return x + 1, torch.ops.aten._unsafe_view(w * 2, [20])


def one_of_two(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    values, indices = w.sort(dim=0)
    return x + values[0, 0], indices


@pytest.mark.parametrize("fn", [viewed, unsafely_viewed, one_of_two])
def test_what_lies_in_the_memory_that_the_caller_gets_is_made_at_every_call(
    fn: Callable[..., Any],
) -> None:
    assert recipes_of(fn) in ([], [""])


@torch.library.custom_op("stator_tests::add_to_constant", mutates_args=("into",))
def add_to_constant(into: Tensor, x: Tensor) -> None:
    into.add_(x)


@add_to_constant.register_fake
def _(into: Tensor, x: Tensor) -> None: ...


@pytest.mark.parametrize("fn", [lambda w: w * 2, torch.clone, lambda w: w.sort(dim=0)[0]])
def test_what_an_operator_writes_to_is_made_at_every_call(fn: Callable[..., Any]) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        into = fn(w)
        torch.ops.stator_tests.add_to_constant(into, x)
        return into.sum() + x

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return program(x, self.w)

    net, x = Net(), torch.ones(5, 4)
    run = stator.compile(net, freezing=True, strict=True, cache=False)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), net(x))


def test_what_would_grow_is_not_kept() -> None:
    assert recipes_of(grown) == [""]


def test_random_numbers_are_drawn_at_every_call() -> None:
    assert all("rand" not in text for text in recipes_of(random))


def test_inputs_that_are_no_weights_stay() -> None:
    graph = with_weights(scaled, (X, W, B), ()).graph
    assert take_constants(graph, frozen=True).arguments == (0, 1, 2)


def test_a_constant_is_no_inference_tensor_whoever_makes_it() -> None:
    constants = take_constants(with_weights(scaled, (X, W, B), (1, 2)).graph, frozen=True)
    recipe = constants.recipes[0]
    with torch.inference_mode():
        made = recipe.make([(X, W, B)[index] for index in recipe.weights])
    assert not made.is_inference()
