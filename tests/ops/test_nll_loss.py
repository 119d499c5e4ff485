"""Negative log likelihood and cross entropy, forward and backward, against eager and float64."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from tests.ops.fused import FLOATS, check_fused
from tests.ops.layouts import plain

REDUCTIONS: Final = ("none", "mean", "sum")
# Sizes of scores; classes are the second dimension, or the only one.
SIZES: Final = ((8, 10), (10,), (2, 7, 3), (2, 7, 3, 4), (2, 7, 3, 4, 2), (5, 1), (1, 6))


def labels_for(size: tuple[int, ...]) -> Tensor:
    """A class for each place."""
    classes = size[min(len(size) - 1, 1)]
    return torch.randint(0, classes, (size[0], *size[2:]) if len(size) > 1 else ())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sizes(size: tuple[int, ...], reduction: str) -> None:
    """With and without weights, with gradients."""
    classes = size[min(len(size) - 1, 1)]

    def loss(x: Tensor, y: Tensor, w: Tensor) -> Any:
        return (
            nll_loss(x, y, reduction=reduction),
            nll_loss(x, y, w, reduction=reduction),
            cross_entropy(x, y, reduction=reduction),
        )

    check_fused(loss, plain(*size).requires_grad_(), labels_for(size), torch.rand(classes))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [-100, 2, 50])
def test_ignored(reduction: str, ignored: int) -> None:
    """Labels that do not count, among the classes and beyond them."""

    def loss(x: Tensor, y: Tensor, w: Tensor) -> Any:
        return (
            cross_entropy(x, y, reduction=reduction, ignore_index=ignored),
            cross_entropy(x, y, w, reduction=reduction, ignore_index=ignored),
        )

    x, y = plain(9, 5), torch.randint(0, 5, (9,))
    y[::3] = ignored
    x[0] = float("nan")  # of a place that does not count
    check_fused(loss, x.requires_grad_(), y, torch.rand(5))


def test_all_ignored() -> None:
    """The mean of nothing is NaN, the sum 0."""

    def loss(x: Tensor, y: Tensor) -> Any:
        return [cross_entropy(x, y, reduction=reduction) for reduction in REDUCTIONS]

    check_fused(loss, plain(4, 5).requires_grad_(), torch.full((4,), -100))
    check_fused(loss, plain(5).requires_grad_(), torch.tensor(-100))


@pytest.mark.parametrize("bad", [-1, 5, 1 << 40])
def test_out_of_bounds(bad: int) -> None:
    """A label that is no class raises, as in eager."""
    check_fused(cross_entropy, plain(4, 5), torch.tensor([0, 1, bad, 3]))
    check_fused(cross_entropy, plain(2, 5, 3), torch.full((2, 3), bad))


@pytest.mark.parametrize("dtype", FLOATS)
def test_types(dtype: torch.dtype) -> None:
    """Halves are widened."""
    check_fused(
        lambda x, y: (cross_entropy(x, y), cross_entropy(x, y, reduction="none")),
        plain(9, 40, dtype=dtype).requires_grad_(),
        torch.randint(0, 40, (9,)),
    )


def test_layouts() -> None:
    """Scores and labels that do not lie in a row."""
    y = torch.randint(0, 6, (7, 2))[:, 0]
    check_fused(cross_entropy, plain(6, 7).mT.requires_grad_(), y)
    check_fused(cross_entropy, plain(6).expand(7, 6), y)
    x = plain(3, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    check_fused(cross_entropy, x.requires_grad_(), torch.randint(0, 4, (3, 5, 6)))


def test_smoothed_and_soft_labels() -> None:
    """Cross entropy's other forms."""

    def loss(x: Tensor, y: Tensor, p: Tensor, w: Tensor) -> Any:
        return (
            cross_entropy(x, y, label_smoothing=0.1),
            cross_entropy(x, y, w, label_smoothing=0.3),
            cross_entropy(x, p),
        )

    given = (torch.randint(0, 7, (6,)), torch.rand(6, 7), torch.rand(7))
    check_fused(loss, plain(6, 7).requires_grad_(), *given)


def test_many_places() -> None:
    """As a language model has them."""
    x, y = plain(2, 300, 211), torch.randint(0, 211, (2, 300))
    check_fused(lambda x, y: cross_entropy(x.flatten(0, 1), y.flatten()), x.requires_grad_(), y)


def test_symbolic_sizes() -> None:
    """Places and classes that only the call knows."""
    y = torch.randint(0, 7, (6,))
    check_fused(cross_entropy, plain(6, 7).requires_grad_(), y, dynamic=True)
