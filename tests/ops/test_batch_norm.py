"""Batch norm, forward and backward, training and evaluation, against eager and float64."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, instance_norm

from stator.loops.ir import Accumulate, Kernel
from tests.ops.fused import check_fused
from tests.ops.layouts import plain
from tests.schedule.programs import scheduled

aten = torch.ops.aten

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


INF: Final = float("inf")
# Channels that one pass might go wrong on: what stands first is what it subtracts.
CHANNELS: Final[dict[str, list[float]]] = {
    "infinity first": [INF, 1.0, 2.0, 3.0],
    "infinity later": [1.0, INF, 2.0, 3.0],
    "minus infinity first": [-INF, 1.0, -INF, 3.0],
    "infinities of both signs": [1.0, INF, -INF, 3.0],
    "both signs, one first": [INF, 2.0, -INF, 3.0],
    "nan first": [float("nan"), 1.0, INF, 3.0],
    "nan later": [1.0, 2.0, float("nan"), 3.0],
    "equal": [0.1, 0.1, 0.1, 0.1],
    "zeros of both signs": [-0.0, 0.0, 0.0, -0.0],
    "largest first": [6e4, 1.0, 2.0, -1.0],
    "least first": [1e-7, 1.0, 2.0, -1.0],
}


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    """What the operator returns: the result, its mean, 1 / deviation, and what moves by them."""
    kind = torch.promote_types(x.dtype, torch.float32)
    old = torch.zeros(x.shape[1], dtype=kind), torch.ones(x.shape[1], dtype=kind)
    op = aten._native_batch_norm_legit_functional.default
    found: tuple[Tensor, ...] = op(x, None, None, *old, True, 0.5, 1e-5)
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CHANNELS)
def test_odd_channels(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """Infinities and NaN reach the mean and the variance as eager's do."""
    odd = torch.tensor(CHANNELS[name], dtype=dtype).reshape(2, 1, 2, 1)
    x = torch.cat([plain(2, 1, 2, 1, dtype=dtype), odd, odd.flip(0, 2)], 1)
    check_fused(statistics, x.contiguous(memory_format=layout))


def test_the_variance_of_equal_elements_is_zero() -> None:
    """Also where their sum is rounded, and far from zero."""
    x = torch.tensor([0.1, 1e30, -3e4, 0.0]).reshape(1, 4, 1).expand(7, 4, 11)

    _, mean, rstd, _, variance = torch.compile(statistics, backend="stator")(x)

    assert torch.equal(mean, x[0, :, 0])
    assert torch.equal(rstd, torch.full((4,), 1e-5, dtype=torch.float64).rsqrt().float())
    assert torch.equal(variance, torch.full((4,), 0.5))  # moved half way from 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("first", [None, 0.0, 3e4, -1e30])
@pytest.mark.parametrize(("center", "spread"), [(1e4, 1e-2), (4e6, 0.5)])
def test_a_small_spread_far_from_zero(
    center: float, spread: float, first: float | None, layout: torch.memory_format
) -> None:
    """Whatever element distances are taken from; from zero, f64 would have no bits left."""
    x = (plain(4, 3, 16, 16) * spread + center).contiguous(memory_format=layout)
    if first is not None:
        x[0, :, 0, 0] = first
    check_fused(statistics, x)


def test_channels_of_two() -> None:
    check_fused(statistics, plain(2, 3, 1, 1))


def test_channels_of_one() -> None:
    """Their variance is 0."""

    def norm(x: Tensor) -> Any:
        return aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)

    check_fused(norm, plain(1, 3, 1, 1))


def test_parts_of_a_tensor() -> None:
    """Elements that do not lie side by side."""
    check_fused(statistics, plain(4, 6, 12, 10)[:, ::2, 1::3, 1:])


def test_narrow_types_are_measured_in_one_loop() -> None:
    """Two sums over the same points; f64 has no wider type to take one pass in."""
    one = scheduled(statistics, torch.empty(4, 3, 8, 8)).only
    two = scheduled(statistics, torch.empty(4, 3, 8, 8, dtype=torch.float64)).only

    def loops(kernel: Kernel) -> list[int]:
        inner = [stage for stage in kernel.stages if stage.inner]
        found = [sum(isinstance(s, Accumulate) for s in stage.body) for stage in inner]
        return [count for count in found if count]

    assert loops(one) == [2]
    assert loops(two) == [1, 1]


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
