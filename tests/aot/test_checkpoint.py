"""torch.utils.checkpoint: what it marks is computed again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.parity import check, compiled

again = partial(checkpoint, use_reentrant=False)
runs: list[str] = []  # one entry for each time the operator below really ran


@torch.library.custom_op("stator_checkpoint::counted_sin", mutates_args=())
def counted_sin(x: Tensor) -> Tensor:
    """sin, and a note that it ran."""
    runs.append("sin")
    return x.sin()


@counted_sin.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


counted_sin.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.fixture(autouse=True)
def _no_runs_yet() -> Iterator[None]:
    runs.clear()
    yield
    runs.clear()


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w).sin()


def test_a_checkpointed_block_gives_the_same_gradients() -> None:
    check(
        lambda x, w: again(block, x, w) * 2,
        torch.randn(3, 4, requires_grad=True),
        torch.randn(4, 4, requires_grad=True),
        fullgraph=True,
    )


def test_a_checkpointed_operator_runs_again_in_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    out = compiled(lambda x: again(lambda y: counted_sin(y).exp(), x), fullgraph=True)(x)
    assert len(runs) == 1
    out.sum().backward()
    assert len(runs) == 2


def test_an_operator_outside_a_checkpoint_runs_once() -> None:
    x = torch.randn(3, requires_grad=True)
    compiled(lambda x: counted_sin(x).exp(), fullgraph=True)(x).sum().backward()
    assert len(runs) == 1


def test_a_checkpoint_without_gradients_runs_once() -> None:
    with torch.no_grad():
        compiled(lambda x: again(lambda y: counted_sin(y).exp(), x))(torch.randn(3))
    assert len(runs) == 1


def test_a_policy_that_saves_an_operator_keeps_it_from_running_again() -> None:
    contexts = partial(
        create_selective_checkpoint_contexts, [torch.ops.stator_checkpoint.counted_sin.default]
    )

    def fn(x: Tensor) -> Tensor:
        return again(lambda y: counted_sin(y.exp()).exp(), x, context_fn=contexts)

    x = torch.randn(3, requires_grad=True)
    compiled(fn, fullgraph=True)(x).sum().backward()
    assert len(runs) == 1
    check(fn, torch.randn(3, requires_grad=True))


def test_a_policy_may_ask_for_one_operator_to_run_again() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.stator_checkpoint.counted_sin.default:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def fn(x: Tensor) -> Tensor:
        return again(lambda y: counted_sin(y).exp(), x, context_fn=contexts) * 2

    check(fn, torch.randn(3, requires_grad=True))


def test_two_checkpoints_in_a_row_both_run_again() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(2):
            x = again(lambda y: counted_sin(y).cos(), x)
        return x

    x = torch.randn(3, requires_grad=True)
    compiled(fn, fullgraph=True)(x).sum().backward()
    assert len(runs) == 4
    check(fn, torch.randn(3, requires_grad=True))


def test_a_checkpoint_inside_a_checkpoint_gives_the_same_gradients() -> None:
    def inner(x: Tensor) -> Tensor:
        return again(lambda y: y.sin().exp(), x).cos()

    check(lambda x: again(inner, x) * 3, torch.randn(3, requires_grad=True))


def test_dropout_in_a_checkpoint_draws_the_same_mask_again() -> None:
    def fn(x: Tensor) -> Tensor:
        return again(lambda y: F.dropout(y.sin(), 0.5).exp(), x)

    check(fn, torch.randn(64, requires_grad=True), seed=3)


def test_dropout_after_a_checkpointed_dropout_is_not_disturbed() -> None:
    def fn(x: Tensor) -> Tensor:
        y = again(lambda y: F.dropout(y.sin(), 0.5).exp(), x)
        return F.dropout(y * 2, 0.5)

    check(fn, torch.randn(64, requires_grad=True), seed=3)


def test_the_generator_is_where_eager_leaves_it_after_a_checkpointed_dropout() -> None:
    def fn(x: Tensor) -> Tensor:
        return again(lambda y: F.dropout(y.sin(), 0.5).exp(), x)

    def next_number(call: Any) -> float:
        torch.manual_seed(1)
        call(torch.ones(8, requires_grad=True)).sum().backward()
        return float(torch.rand(()))

    assert next_number(compiled(fn)) == next_number(fn)


class Block(nn.Module):
    """A residual block under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + again(lambda y: self.down(F.gelu(self.up(self.norm(y)))), x)


def test_a_stack_of_checkpointed_modules_trains() -> None:
    check(nn.Sequential(Block(), Block()), torch.randn(3, 4), calls=2)


def test_a_checkpoint_that_need_not_keep_the_generator_trains() -> None:
    check(
        lambda x: again(torch.sin, x.exp(), preserve_rng_state=False) * 2,
        torch.randn(3, requires_grad=True),
    )


def test_a_checkpoint_takes_keywords_and_returns_several_results() -> None:
    def inner(x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        return x.sin() * scale, x.cos()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = again(inner, x, scale=2.0)
        return out

    check(fn, torch.randn(3, requires_grad=True))


def test_a_checkpoint_around_the_compiled_function_runs_it_again() -> None:
    def use(fn: Any, x: Tensor) -> Tensor:
        return again(fn, x) * 2

    check(lambda x: x.sin().exp(), torch.randn(3, requires_grad=True), use=use)


def test_double_backward_through_a_checkpoint() -> None:
    def use(fn: Any, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        return grad

    fn = partial(again, lambda y: y.sin().exp())
    check(lambda x: fn(x) * 2, torch.randn(3, requires_grad=True), use=use)
