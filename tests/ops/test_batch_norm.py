"""Batch norm, forward and backward, training and evaluation, against eager and float64."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, instance_norm

from tests.ops.fused import check_fused
from tests.ops.layouts import plain

WRITES: Final = ("copy__default",)  # running statistics go back into their buffers


def filled(module: nn.Module) -> nn.Module:
    """With parameters and statistics that are not all 0 or 1."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(plain(*tensor.shape))
            if name == "running_var":
                tensor.abs_()
    return module


@pytest.mark.parametrize("size", [(9, 6), (3, 6, 7), (4, 6, 5, 5), (2, 6, 2, 3, 4), (2, 6, 60, 60)])
def test_training(size: tuple[int, ...]) -> None:
    """Results, gradients and running statistics, for any number of dimensions."""
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    module = filled(kinds[len(size)](6))
    check_fused(module, plain(*size).requires_grad_(), stays=WRITES, calls=2)


@pytest.mark.parametrize("size", [(9, 6), (4, 6, 5, 5)])
def test_evaluation(size: tuple[int, ...]) -> None:
    """Running statistics normalize."""
    module = filled((nn.BatchNorm1d if len(size) == 2 else nn.BatchNorm2d)(6)).eval()
    check_fused(module, plain(*size).requires_grad_())
    with torch.no_grad():
        check_fused(module, plain(*size))


@pytest.mark.parametrize(
    "settings",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": 0.4, "eps": 0.1},
    ],
)
def test_settings(settings: dict[str, Any]) -> None:
    """Without parameters, without statistics, with other numbers."""
    module = filled(nn.BatchNorm2d(6, **settings))
    check_fused(module, plain(3, 6, 5, 5).requires_grad_(), stays=WRITES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_types(dtype: torch.dtype, training: bool) -> None:
    """Halves are widened."""
    module = filled(nn.BatchNorm2d(6)).to(dtype).train(training)
    check_fused(module, plain(3, 6, 5, 5, dtype=dtype).requires_grad_(), stays=WRITES)


@pytest.mark.parametrize("training", [True, False])
def test_halves_with_wide_parameters(training: bool) -> None:
    """As autocast gives them."""
    module = filled(nn.BatchNorm2d(6)).train(training)
    x = plain(3, 6, 5, 5, dtype=torch.bfloat16)
    check_fused(module, x.requires_grad_(), stays=WRITES)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_some(wanted: tuple[int, ...], training: bool) -> None:
    """Only the gradients that somebody asks for."""
    given = [plain(4, 6, 5), plain(6), plain(6)]
    for index in wanted:
        given[index].requires_grad_()
    mean, variance = plain(6), plain(6).abs()

    def norm(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Tensor:
        result: Tensor = batch_norm(x, m, v, w, b, training)
        return result

    check_fused(norm, *given, mean, variance, stays=WRITES)


def test_channels_last() -> None:
    """Channels that lie closest."""
    x = plain(3, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    check_fused(filled(nn.BatchNorm2d(6)), x.requires_grad_(), stays=WRITES)


@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_large_batches_are_as_exact_as_eagers(shift: float) -> None:
    """Many elements for each channel, far from zero."""
    module = filled(nn.BatchNorm2d(3))
    check_fused(module, (plain(16, 3, 64, 64) + shift).requires_grad_(), stays=WRITES)


def test_instance_norm() -> None:
    """Samples as channels."""
    check_fused(instance_norm, plain(3, 4, 5, 6).requires_grad_())


def test_between_others() -> None:
    """A block as in a convolutional network, without its convolution."""

    def block(x: Tensor, y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        result: Tensor = torch.relu(norm(torch.tanh(x) * 2) + y)
        return result

    x, y = plain(3, 6, 5, 5).requires_grad_(), plain(3, 6, 5, 5).requires_grad_()
    check_fused(block, x, y, filled(nn.BatchNorm2d(6)), stays=WRITES)


def test_symbolic_batch() -> None:
    """Counts that only the call knows."""
    module = filled(nn.BatchNorm2d(6))
    check_fused(module, plain(3, 6, 5, 5).requires_grad_(), stays=WRITES, dynamic=True)
