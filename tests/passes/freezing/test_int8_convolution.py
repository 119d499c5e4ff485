"""Convolutions of integers: when, what is inside, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.ops.libraries import int8_convolution as onednn_convolution
from stator.passes.freezing.int8_convolution import int8_convolution
from tests.passes.freezing.accuracy import is_as_exact
from tests.passes.freezing.graphs import rewritten, run_with_constants
from tests.passes.freezing.integers import (
    called,
    dequantized,
    dequantized_weight,
    exactly,
    integers,
    quantized,
    requantized,
    weight_of,
)

pytestmark = pytest.mark.skipif(onednn_convolution() is None, reason="torch has no oneDNN here")


def check(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[str], list[str]]:
    """The same result, up to one integer in a few; names of what is called, and the notes."""
    module, ctx = rewritten(fn, inputs, (1, 2, 3), int8_convolution)
    names = called(module)
    (output,) = module.graph.find_nodes(op="output")
    foretold = output.args[0][0].meta["val"]
    (found, *_), _ = run_with_constants(module, inputs)
    expected = fn(*inputs)
    assert (found.dtype, found.stride()) == (foretold.dtype, foretold.stride())
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype.is_floating_point:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    else:
        distance = (found.int() - expected.int()).abs()
        assert distance.max() <= 1
        assert (distance > 0).float().mean() <= 0.01
    return names, ctx.record.notes


def image(*size: int, last: bool = False) -> Tensor:
    """Bytes."""
    x = integers(torch.uint8, *size)
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, None], ids=str)
def test_convolutions_of_dequantised_images(
    last: bool, groups: int, kind: torch.dtype | None
) -> None:
    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = F.conv2d(dequantized(x), dequantized_weight(w, scales), b, 2, 1, 1, groups)
        return y if kind is None else requantized(y, kind)

    inputs = image(2, 16, 9, 8, last=last), *weight_of(32, 16 // groups, 3, 3), torch.randn(32)
    names, notes = check(convolved, *inputs)
    assert "onednn.qconv_pointwise.default" in names
    assert not any("quantize" in name or "aten.convolution" in name for name in names)
    assert "is int8" in notes[0]


def test_convolutions_are_as_exact_as_those_of_floats() -> None:
    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(dequantized(x), dequantized_weight(w, scales), b, padding=1)

    inputs = image(2, 64, 9, 8), *weight_of(32, 64, 3, 3), torch.randn(32)
    module, _ = rewritten(convolved, inputs, (1, 2, 3), int8_convolution)
    (found, *_), _ = run_with_constants(module, inputs)
    # A pixel of padding is 0, not its integer.
    exact = F.conv2d(*exactly(*inputs[:3]), inputs[3].double(), padding=1)
    assert is_as_exact(found, convolved(*inputs), exact)


@pytest.mark.parametrize("dims", [1, 3])
def test_lines_and_volumes(dims: int) -> None:
    convolve = {1: F.conv1d, 3: F.conv3d}[dims]

    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return requantized(
            convolve(dequantized(x), dequantized_weight(w, scales), b).relu(), torch.uint8
        )

    inputs = image(2, 16, *[6] * dims), *weight_of(32, 16, *[3] * dims), torch.randn(32)
    names, _ = check(convolved, *inputs)
    assert "onednn.qconv_pointwise.default" in names


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "hardtanh": lambda y: F.hardtanh(y, -0.5, 2.0),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_stands_behind_is_inside(activation: str) -> None:
    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = F.conv2d(dequantized(x), dequantized_weight(w, scales), b)
        return requantized(ACTIVATIONS[activation](y), torch.uint8)

    inputs = image(2, 16, 9, 8, last=True), *weight_of(32, 16, 3, 3), torch.randn(32)
    names, notes = check(convolved, *inputs)
    if activation == "gelu":  # which oneDNN's convolution of integers has not
        assert "gelu reads it" in notes[0]
    else:
        assert "inside, and gives uint8" in notes[0]
        assert names[-1] == "onednn.qconv_pointwise.default"


def test_the_scale_may_be_known_at_run_time_alone() -> None:
    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        scale, zero_point = quantized.choose_qparams.tensor(x, 0, 255, 1e-6, torch.uint8)
        rest = (scale, zero_point, 0, 255, torch.uint8)
        real = quantized.dequantize_per_tensor.tensor(
            quantized.quantize_per_tensor.tensor(x, *rest), *rest
        )
        return F.conv2d(real, dequantized_weight(w, scales), b, padding=1)

    inputs = torch.randn(2, 16, 9, 8), *weight_of(32, 16, 3, 3), torch.randn(32)
    names, _ = check(convolved, *inputs)
    assert "onednn.qconv_pointwise.tensor" in names
    assert "aten.permute.default" not in names

    turned = inputs[0].contiguous(memory_format=torch.channels_last)
    names, _ = check(convolved, turned, *inputs[1:])
    assert "aten.permute.default" in names  # extremes are found as the image lies


def test_one_behind_the_other_passes_bytes_on() -> None:
    """Nothing lies between two of them, though floats lay there as rows."""

    def convolved(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = dequantized(x)
        for _ in range(3):
            y = F.conv2d(y, dequantized_weight(w, scales), b, padding=1)
            y = dequantized(requantized(y.relu(), torch.uint8))
        return y

    inputs = image(2, 16, 9, 8), *weight_of(16, 16, 3, 3), torch.randn(16)
    module, _ = rewritten(convolved, inputs, (1, 2, 3), int8_convolution)
    first, second, third = (
        node for node in module.graph.nodes if "qconv_pointwise" in str(node.target)
    )
    assert second.args[0] is first
    assert third.args[0] is second


def residual(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return activated(F.relu, x, w, scales, b)


def activated(
    activation: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, scales: Tensor, b: Tensor
) -> Tensor:
    weight, around = dequantized_weight(w, scales), w.size(-1) // 2

    def convolved(image: Tensor) -> Tensor:
        return F.conv2d(image, weight, b, padding=around)

    y = dequantized(requantized(convolved(dequantized(x)), torch.uint8))
    z = dequantized(requantized(convolved(y).relu(), torch.uint8))
    return requantized(activation(convolved(z) + y), torch.uint8)


def twice(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    y = dequantized(residual(x, w, scales, b))
    z = dequantized(requantized(F.conv2d(y, dequantized_weight(w, scales), b), torch.uint8))
    return requantized(F.conv2d(z, dequantized_weight(w, scales), b) + y, torch.uint8)


def read_later(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = dequantized_weight(w, scales)
    y = dequantized(requantized(F.conv2d(dequantized(x), weight, b), torch.uint8))
    z = dequantized(requantized(F.conv2d(y, weight, b) + y, torch.uint8))
    return requantized(F.conv2d(z, weight, b) * y, torch.uint8)


def of_other_integers(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = dequantized_weight(w, scales)
    y = dequantized(requantized(F.conv2d(dequantized(x), weight, b), torch.uint8))
    return requantized(F.conv2d(y, weight, b) + y, torch.int8)


def of_floats_again(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = dequantized_weight(w, scales)
    y = dequantized(requantized(F.conv2d(dequantized(x), weight, b), torch.uint8))
    return F.conv2d(y, weight, b) + y


def to_the_image(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = dequantized_weight(w, scales)
    y = dequantized(requantized(F.conv2d(dequantized(x), weight, b), torch.uint8))
    return requantized(F.conv2d(y, weight, b) + y, torch.uint8)


def with_hardswish(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return activated(F.hardswish, x, w, scales, b)


def with_silu(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return activated(F.silu, x, w, scales, b)


def with_relu6(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return activated(F.relu6, x, w, scales, b)


def to_the_input(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    y = dequantized(x)
    return requantized(F.conv2d(y, dequantized_weight(w, scales), b) + y, torch.uint8)


UNPADDED: Final = (read_later, of_other_integers, of_floats_again, to_the_image, to_the_input)


@pytest.mark.parametrize(
    ("fn", "inside"),
    [
        (residual, True),
        (read_later, False),
        (of_other_integers, False),
        (of_floats_again, False),
        (to_the_image, False),
        (to_the_input, False),
        (with_hardswish, False),  # oneDNN has none or relu behind a sum
        (with_silu, False),
        (with_relu6, False),
    ],
)
def test_sums_with_integers_that_nobody_reads_later_are_inside(
    fn: Callable[..., Tensor], inside: bool
) -> None:
    for side, name in ((1, "int8_linear_plus"), (3, "int8_convolution_plus")):
        if side > 1 and fn in UNPADDED:  # of another size than what is added
            continue
        inputs = image(2, 16, 9, 8, last=True), *weight_of(16, 16, side, side), torch.randn(16)
        names, notes = check(fn, *inputs)
        assert any(name in called_ for called_ in names) == inside
        assert any("add" in note and "inside" in note for note in notes) == inside


class Frozen(torch.nn.Module):
    """A function of an image and of weights."""

    def __init__(self, fn: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for number, tensor in enumerate(weights):
            self.register_buffer(f"b{number}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.buffers())


@pytest.mark.parametrize(
    ("fn", "side", "operator", "count"),
    [
        (residual, 1, "onednn.qlinear_pointwise.binary", 1),
        (residual, 3, "onednn.qconv2d_pointwise.binary", 1),
        (twice, 1, "onednn.qlinear_pointwise.binary", 2),
    ],
)
def test_sums_are_added_where_the_integers_lie(
    fn: Callable[..., Tensor],
    side: int,
    operator: str,
    count: int,
    tmp_path: Path,
) -> None:
    x, *weights = image(2, 16, 9, 8, last=True), *weight_of(16, 16, side, side), torch.randn(16)
    model = Frozen(fn, *weights)
    options = {"freezing": True, "dump_dir": str(tmp_path)}
    compiled = torch.compile(model, backend="stator", options=options)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            distance = (compiled(x).int() - expected.int()).abs()
            assert distance.max() <= 1
            assert (distance > 0).float().mean() <= 0.01
    (plan,) = tmp_path.rglob("forward_plan.txt")
    assert plan.read_text().count(operator) == count
    assert "int8_linear_plus(" not in plan.read_text()  # which would copy


def test_what_a_returned_tensor_lies_in_is_not_added_to(tmp_path: Path) -> None:
    def both(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        weight = dequantized_weight(w, scales)
        whole = requantized(F.conv2d(dequantized(x), weight, b), torch.uint8)
        y = dequantized(whole)
        return whole, requantized(F.conv2d(y, weight, b).relu() + y, torch.uint8)

    x, *weights = image(2, 16, 9, 8, last=True), *weight_of(16, 16, 1, 1), torch.randn(16)
    model = Frozen(both, *weights)
    compiled = torch.compile(model, backend="stator", options={"freezing": True})
    with torch.no_grad():
        for found, expected in zip(compiled(x), model(x), strict=True):
            assert (found.int() - expected.int()).abs().max() <= 1


def transposed(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return F.conv_transpose2d(dequantized(x), dequantized_weight(w, scales))


def of_signed(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(dequantized(x.char()), dequantized_weight(w, scales), b)


def of_floats(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x.float(), dequantized_weight(w, scales), b)


def of_float_weights(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(dequantized(x), w.float(), b)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (transposed, "it is a transposed one"),
        (of_signed, "its image is not of uint8"),
        (of_floats, "its image is not dequantised per tensor"),
        (of_float_weights, "its weight is not dequantised"),
    ],
)
def test_what_is_not_int8_says_why(fn: Callable[..., Tensor], reason: str) -> None:
    inputs = image(2, 16, 9, 8), *weight_of(16, 16, 3, 3), torch.randn(16)
    names, notes = check(fn, *inputs)
    assert not any("onednn" in name for name in names)
    assert reason in notes[0]
