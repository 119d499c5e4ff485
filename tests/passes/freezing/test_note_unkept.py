"""What is made of weights alone and stays in the program says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.graph.run import Ctx
from stator.passes.freezing.note_unkept import note_unkept
from tests.passes.freezing.graphs import with_weights

X, W = torch.randn(3, 4), torch.randn(5, 4)


def masked(x: Tensor, w: Tensor) -> Tensor:
    return x @ (w * torch.ones(5, 4).tril()).t().exp()


def grown(x: Tensor, w: Tensor) -> Tensor:
    return w.exp().repeat(2000, 100).sum() + x


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made = w.exp()
    return x @ made.t(), made


def only_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), w.exp()


def kept(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.exp().t() + torch.ones(5)


def random(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.rand_like(w).sum()


@pytest.mark.parametrize(
    ("fn", "notes"),
    [
        (masked, ["mul is computed at every call: it reads tril, which is made of no weight"]),
        (
            grown,
            ["repeat is computed at every call: what it makes is much larger than its weights"],
        ),
        (returned, ["exp is computed at every call: the caller gets it, and may write to it"]),
        (only_returned, []),
        (kept, []),
        (random, []),
    ],
)
def test_what_could_have_been_a_constant_is_noted_once(
    fn: Callable[..., Any], notes: list[str]
) -> None:
    ctx = Ctx()
    note_unkept(with_weights(fn, (X, W), (1,)).graph, ctx)

    assert ctx.record.notes == notes
