"""Equal calls of the forward become one, unless the backward or the caller could tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from stator.core.fuel import Fuel
from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint.share_forward import share_forward
from tests.aot.partition.programs import Flat, checkpointed, leaf, targets, traced
from tests.parity import compiled


def shared(fn: Flat, tagged: str = "") -> int:
    """How many calls go, where the last call of `tagged` is in a checkpointed region."""
    joint = traced(fn, leaf(4, 5), leaf(5, 5))
    graph = joint.module.graph
    if tagged:
        checkpointed(joint, [tagged], CheckpointPolicy.MUST_RECOMPUTE)
        first = next(node for node in graph.nodes if targets([node]) == [tagged])
        del first.meta["recompute"], first.meta["ac_graph_id"]
    drop_unread(graph)
    count = share_forward(graph, Ctx(fuel=Fuel(None)))
    verify(graph, after="share_forward")
    return count


def doubled(x: Tensor, w: Tensor) -> list[Tensor]:
    return [((x @ w).sin() + (x @ w).exp()).sum()]


def test_equal_calls_of_the_forward_are_one() -> None:
    assert shared(doubled) == 1


def test_in_a_region_of_its_own_a_call_is_left() -> None:
    assert shared(doubled, tagged="mm.default") == 0


def test_what_the_caller_may_write_to_is_left() -> None:
    assert shared(lambda x, w: [x @ w, (x @ w).sin()]) == 0
    assert shared(lambda x, w: [(x @ w).t(), (x @ w).sin()]) == 0


def test_what_the_backward_computes_again_is_left() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] * x.cos()

    assert shared(lambda x, w: [Twice.apply(x).sin() @ w]) == 0


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_a_value_that_is_computed_twice_is_kept_once(budget: float) -> None:
    def twice(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((x @ w).sigmoid() * a + (x @ w).sigmoid() * b).sin().sum()

    def once(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = (x @ w).sigmoid()
        return (y * a + y * b).sin().sum()

    def kept(program: Any) -> int:
        saved: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            saved.append(value)
            return value

        call = compiled(program, fullgraph=True, options={"memory_budget": budget})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            call(leaf(256, 64), leaf(64, 256), leaf(256), leaf(256)).backward()
        return sum({t.untyped_storage().data_ptr(): t.nbytes for t in saved}.values())

    assert kept(twice) == kept(once)
