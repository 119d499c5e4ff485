"""Losses, forward and backward, against eager and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.ops.fused import FLOATS, check_fused
from tests.ops.layouts import odd_values, plain

REDUCTIONS: Final = ("none", "mean", "sum")
LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "smooth l1 of 0.3": lambda x, y, **k: functional.smooth_l1_loss(x, y, beta=0.3, **k),
    "huber": functional.huber_loss,
    "huber of 0.3": lambda x, y, **k: functional.huber_loss(x, y, delta=0.3, **k),
    "soft margin": lambda x, y, **k: functional.soft_margin_loss(x, y.sign(), **k),
    "logits": lambda x, y, **k: functional.binary_cross_entropy_with_logits(x, y.sigmoid(), **k),
    "kl": lambda x, y, reduction="sum": functional.kl_div(x, y.abs(), reduction=reduction),
    "kl of logarithms": lambda x, y, reduction="sum": functional.kl_div(
        x, y, log_target=True, reduction=reduction
    ),
    "poisson": functional.poisson_nll_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(name: str, reduction: str) -> None:
    """Each element, their mean and their sum, with gradients."""

    if name.startswith("kl") and reduction == "mean":
        reduction = "batchmean"  # the other one warns

    def loss(x: Tensor, y: Tensor) -> Any:
        return LOSSES[name](x, y, reduction=reduction)

    check_fused(loss, plain(6, 7).requires_grad_(), plain(6, 7))


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not torch.float32])
def test_types(dtype: torch.dtype) -> None:
    """Halves are widened."""

    def loss(x: Tensor, y: Tensor) -> Any:
        return [LOSSES[name](x, y) for name in LOSSES]

    check_fused(loss, plain(5, 40, dtype=dtype).requires_grad_(), plain(5, 40, dtype=dtype))


@pytest.mark.parametrize("name", ["mse", "smooth l1", "huber", "soft margin", "logits"])
def test_odd_values(name: str) -> None:
    """NaN, infinities and equal elements go through as in eager."""
    x = odd_values()
    check_fused(
        lambda x, y: LOSSES[name](x, y, reduction="none"), x.requires_grad_(), x.detach().roll(1)
    )
    check_fused(lambda x, y: LOSSES[name](x, y, reduction="none"), x, x.detach().roll(1, 1))


def test_layouts() -> None:
    """Transposed, expanded, of one element, of none of the dimensions."""

    def losses(x: Tensor, y: Tensor) -> Any:
        return functional.mse_loss(x, y), functional.huber_loss(x, y, reduction="none")

    check_fused(losses, plain(6, 7).mT.requires_grad_(), plain(7, 6))
    check_fused(losses, plain(7, 1).expand(7, 6), plain(7, 6).requires_grad_())
    check_fused(losses, plain().requires_grad_(), plain())
    check_fused(losses, plain(1).requires_grad_(), plain(1))
    check_fused(losses, plain(300, 400).requires_grad_(), plain(300, 400))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(reduction: str, weighted: bool) -> None:
    """Of probabilities, those of 0 and 1 included."""

    def loss(x: Tensor, y: Tensor, w: Tensor) -> Any:
        weight = w if weighted else None
        return functional.binary_cross_entropy(x, y, weight, reduction=reduction)

    x = torch.rand(6, 7)
    x[0, :4] = torch.tensor([0.0, 1.0, 0.0, 1.0])
    y = torch.rand(6, 7)
    y[0, :4] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    check_fused(loss, x.requires_grad_(), y, torch.rand(6, 7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_cross_entropy_types(dtype: torch.dtype) -> None:
    """Halves are widened."""
    x, y = torch.rand(5, 9).to(dtype), torch.rand(5, 9).to(dtype)
    check_fused(functional.binary_cross_entropy, x.requires_grad_(), y)


@pytest.mark.parametrize("which", ["input", "target"])
@pytest.mark.parametrize("value", [1.5, -0.5, float("nan")])
def test_no_probability(which: str, value: float) -> None:
    """Eager raises; so do we."""
    good, bad = torch.rand(8), torch.rand(8)
    bad[3] = value
    given = (bad, good) if which == "input" else (good, bad)
    check_fused(functional.binary_cross_entropy, *given)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_with_weights(reduction: str) -> None:
    """Weights of elements and of the positive class, both broadcast."""

    def loss(x: Tensor, y: Tensor, w: Tensor, p: Tensor) -> Any:
        entropy = functional.binary_cross_entropy_with_logits
        return (
            entropy(x, y, w, reduction=reduction),
            entropy(x, y, pos_weight=p, reduction=reduction),
            entropy(x, y, w, reduction=reduction, pos_weight=p),
        )

    check_fused(
        loss, (plain(6, 7) * 30).requires_grad_(), torch.rand(6, 7), torch.rand(6, 1), torch.rand(7)
    )


def test_symbolic_sizes() -> None:
    """Means over counts that only the call knows."""
    check_fused(
        lambda x, y: (functional.mse_loss(x, y), functional.huber_loss(x, y)),
        plain(6, 7).requires_grad_(),
        plain(6, 7),
        dynamic=True,
    )
