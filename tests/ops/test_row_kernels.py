"""Norms, losses and reductions over rows are one kernel each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.ops.kernels import kernel_count
from tests.ops.layouts import plain

aten = torch.ops.aten

ONE: Final[dict[str, Callable[[Tensor], Any]]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of a sum": lambda x: (x + x.tanh()).softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: functional.layer_norm(x * 2, (24,)),
    "rms norm": lambda x: x * (x.pow(2).mean(-1, True) + 1e-6).rsqrt(),
    "normalize": lambda x: functional.normalize(x),
    "variance": lambda x: torch.var_mean(x, -1),
    "argmax": lambda x: x.max(-1),
    "standardized": lambda x: (x - x.mean(-1, True)) / x.std(-1, keepdim=True),
    "mse": lambda x: functional.mse_loss(x, x * 2),
    "cumsum": lambda x: x.exp().cumsum(-1) * 2,
}


@pytest.mark.parametrize("name", ONE)
def test_one_kernel(name: str) -> None:
    """All passes over a row run while it is at hand."""
    assert kernel_count(ONE[name], plain(8, 24)) == 1


def test_cross_entropy() -> None:
    """Rows in one kernel, and the sum over them in another; backward is one."""
    x, y = plain(32, 50), torch.randint(0, 50, (32,))

    def backward(grad: Tensor, scores: Tensor, y: Tensor, weight: Tensor) -> Any:
        inner = aten.nll_loss_backward(grad, scores, y, None, 1, -100, weight)
        return aten._log_softmax_backward_data(inner, scores, 1, torch.float32)

    assert kernel_count(functional.cross_entropy, x, y) == 2
    assert kernel_count(backward, plain(), x, y, torch.tensor(32.0)) == 1


def test_batch_norm() -> None:
    """Statistics, running statistics and the result in one kernel; all gradients in another."""
    x, row = plain(4, 6, 5, 5), plain(6)

    def forward(x: Tensor, row: Tensor) -> Any:
        return aten._native_batch_norm_legit_functional(x, row, row, row, row, True, 0.1, 1e-5)

    def backward(x: Tensor, row: Tensor) -> Any:
        wanted = [True, True, True]
        return aten.native_batch_norm_backward(x, x, row, row, row, row, row, True, 1e-5, wanted)

    assert kernel_count(forward, x, row) == 1
    assert kernel_count(backward, x, row) == 1


def test_layer_norm_backward() -> None:
    """The input's gradient in rows, those of weight and bias in columns."""
    x, row, statistics = plain(8, 24), plain(24), plain(8, 1)

    def backward(x: Tensor, row: Tensor, statistics: Tensor) -> Any:
        wanted = [True, True, True]
        return aten.native_layer_norm_backward(
            x, x * 2, [24], statistics, statistics, row, row, wanted
        )

    assert kernel_count(backward, x, row, statistics) == 2
