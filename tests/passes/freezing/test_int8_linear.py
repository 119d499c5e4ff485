"""Products of integers: when, what is inside, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stator
from stator.ops.libraries import int8_linear as onednn_linear
from stator.passes.freezing.int8_linear import int8_linear
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

pytestmark = pytest.mark.skipif(onednn_linear() is None, reason="torch has no oneDNN here")


def check(
    fn: Callable[..., Any], *inputs: Tensor, weights: tuple[int, ...] = (1, 2, 3)
) -> tuple[list[str], list[str]]:
    """The same result, up to one integer in a few; names of what is called, and the notes."""
    module, ctx = rewritten(fn, inputs, weights, int8_linear)
    names = called(module)
    (found, *_), _ = run_with_constants(module, inputs)
    expected = fn(*inputs)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype.is_floating_point:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    else:
        distance = (found.int() - expected.int()).abs()
        assert distance.max() <= 1
        assert (distance > 0).float().mean() <= 0.01
    return names, ctx.record.notes


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("size", [(1, 64), (20, 64), (2, 5, 64)], ids=str)
def test_products_of_dequantised_tensors(
    kind: torch.dtype, biased: bool, size: tuple[int, ...]
) -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.linear(dequantized(x), dequantized_weight(w, scales), b if biased else None)

    names, notes = check(product, integers(kind, *size), *weight_of(48, 64), torch.randn(48))
    assert "onednn.qlinear_pointwise.default" in names
    assert not any("dequantize" in name or "mm" in name for name in names)
    assert "is int8, and gives float32" in notes[0]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8], ids=str)
def test_products_are_as_exact_as_those_of_floats(kind: torch.dtype) -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.linear(dequantized(x), dequantized_weight(w, scales), b)

    inputs = integers(kind, 20, 640), *weight_of(48, 640), torch.randn(48)
    module, _ = rewritten(product, inputs, (1, 2, 3), int8_linear)
    (found, *_), _ = run_with_constants(module, inputs)
    assert is_as_exact(found, product(*inputs), F.linear(*exactly(*inputs[:3]), inputs[3].double()))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu of tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardtanh": lambda y: F.hardtanh(y, -0.5, 2.0),
    "clamp": lambda y: y.clamp(-0.5, 2.0),
    "silu": F.silu,
    "hardswish": F.hardswish,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, None], ids=str)
def test_what_stands_behind_is_inside(activation: str, kind: torch.dtype | None) -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = ACTIVATIONS[activation](F.linear(dequantized(x), dequantized_weight(w, scales), b))
        return y if kind is None else requantized(y, kind)

    inputs = integers(torch.uint8, 2, 9, 64), *weight_of(48, 64), torch.randn(48)
    names, notes = check(product, *inputs)
    assert [name for name in names if "view" not in name and "call" not in name][-1].startswith(
        "onednn.qlinear"
    )
    assert "inside" in notes[0]


def test_the_scale_may_be_known_at_run_time_alone() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        scale, zero_point = quantized.choose_qparams.tensor(x, 0, 255, 1e-6, torch.uint8)
        rest = (scale, zero_point, 0, 255, torch.uint8)
        whole = quantized.quantize_per_tensor.tensor(x, *rest)
        real = quantized.dequantize_per_tensor.tensor(whole, *rest)
        return F.linear(real, dequantized_weight(w, scales), b).relu()

    names, notes = check(product, torch.randn(20, 64), *weight_of(48, 64), torch.randn(48))
    assert "onednn.qlinear_pointwise.tensor" in names
    assert "aten.relu.default" in names  # oneDNN's makes 0 of NaN
    assert "is int8" in notes[0]


def test_several_readers_of_one_dequantised_tensor() -> None:
    def products(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        real, weight = dequantized(x), dequantized_weight(w, scales)
        return F.linear(real, weight, b) + F.linear(real.flip(0), weight) + real[:, :48]

    names, notes = check(
        products, integers(torch.uint8, 9, 64), *weight_of(48, 64), torch.randn(48)
    )
    assert names.count("onednn.qlinear_pointwise.default") == 1
    assert any("not int8: its input is not dequantised" in note for note in notes)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [torch.uint8, None], ids=str)
def test_rows_that_do_not_lie_one_behind_the_other(biased: bool, kind: torch.dtype | None) -> None:
    """Which torch makes a product of batches of."""

    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        weight = dequantized_weight(w, scales).t().expand(2, 64, 48)
        y = torch.bmm(dequantized(x).transpose(1, 2), weight)
        y = (y + b if biased else y).relu()
        return y if kind is None else requantized(y, kind)

    inputs = integers(torch.uint8, 2, 64, 9), *weight_of(48, 64), torch.randn(48)
    names, notes = check(product, *inputs)
    assert names[-1] == "onednn.qlinear_pointwise.default"
    assert "aten.add.Tensor" not in names
    assert "relu inside" in notes[0]


def test_batches_of_two_dequantised_tensors_say_why() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(dequantized(x), dequantized(x).transpose(1, 2)) + b[0]

    inputs = integers(torch.uint8, 2, 8, 8), *weight_of(48, 64), torch.randn(48)
    _, notes = check(product, *inputs)
    assert "bmm is not int8: its weight" in notes[0]


@pytest.fixture
def usual_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """The type of numbers that have none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("usual_dtype")
@pytest.mark.parametrize(
    "usual_dtype", [torch.float32, torch.float64, torch.bfloat16], indirect=True
)
def test_one_scale_for_all_of_the_weight() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        weight = quantized.dequantize_per_tensor.default(w, 0.02, 0, -128, 127, torch.int8)
        return F.linear(dequantized(x), weight, b)

    bias = torch.randn(48, dtype=torch.float32)
    names, _ = check(product, integers(torch.uint8, 9, 64), *weight_of(48, 64), bias)
    assert "onednn.qlinear_pointwise.default" in names


def test_a_weight_that_is_large_in_floats() -> None:
    """Constants may grow but so far; integers do not grow."""

    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.linear(dequantized(x), dequantized_weight(w, scales), b)

    inputs = integers(torch.uint8, 2, 1024), *weight_of(1024, 1024), torch.randn(1024)
    names, _ = check(product, *inputs)
    assert "onednn.qlinear_pointwise.default" in names


def test_what_stays_of_floats_is_dequantised_once() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, dequantized_weight(w, scales), b)

    inputs = torch.randn(2, 1024), *weight_of(1024, 1024), torch.randn(1024)
    module, _ = rewritten(product, inputs, (1, 2, 3), int8_linear)
    _, constants = run_with_constants(module, inputs)
    assert any("dequantize" in recipe.text for recipe in constants.recipes)
    assert not any("dequantize" in name for name in called(module))


def test_a_result_that_others_read_stays_a_float() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = F.linear(dequantized(x), dequantized_weight(w, scales), b)
        return y + dequantized(requantized(y, torch.uint8))

    _, notes = check(product, integers(torch.uint8, 9, 64), *weight_of(48, 64), torch.randn(48))
    assert "gives float32 (2 read addmm)" in notes[0]


def test_narrow_bounds_are_kept() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        y = F.linear(dequantized(x), dequantized_weight(w, scales), b)
        whole: Tensor = quantized.quantize_per_tensor.default(y, 0.01, 3, 0, 127, torch.uint8)
        return whole

    names, notes = check(product, integers(torch.uint8, 9, 64), *weight_of(48, 64), torch.randn(48))
    assert "quantized_decomposed.quantize_per_tensor.default" in names
    assert "quantize_per_tensor reads it" in notes[0]


def of_floats(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.float(), dequantized_weight(w, scales), b)


def of_columns(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = quantized.dequantize_per_channel.default(w, scales, None, 1, -128, 127, torch.int8)
    return F.linear(dequantized(x), weight, b)


def untransposed(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return dequantized(x) @ dequantized_weight(w, scales)


def of_bytes(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    weight = quantized.dequantize_per_tensor.default(w.byte(), 0.1, 0, 0, 255, torch.uint8)
    return F.linear(dequantized(x), weight, b)


def plus_matrix(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b.expand(9, 64), dequantized(x), dequantized_weight(w, scales).t())


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (of_floats, "its input is not dequantised per tensor"),
        (of_columns, "the channels of its weight are not its rows"),
        (untransposed, "rows being channels"),
        (of_bytes, "its weight is not of int8"),
        (plus_matrix, "what is added is no bias"),
    ],
)
def test_what_is_not_int8_says_why(fn: Callable[..., Tensor], reason: str) -> None:
    names, notes = check(fn, integers(torch.uint8, 9, 64), *weight_of(64, 64), torch.randn(64))
    assert not any("onednn" in name for name in names)
    assert reason in notes[0]


def test_who_reads_a_weight_otherwise_says_so() -> None:
    def looked_up(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return F.embedding(x.long(), dequantized_weight(w, scales))

    inputs = integers(torch.uint8, 9), *weight_of(256, 64)
    _, ctx = rewritten(looked_up, inputs, (1, 2), int8_linear)
    assert "embedding is not int8: it reads dequantize_per_channel" in ctx.record.notes[0]


def test_a_weight_that_is_no_constant_says_so() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return F.linear(dequantized(x), dequantized_weight(w, scales))

    inputs = integers(torch.uint8, 9, 64), *weight_of(48, 64)
    _, ctx = rewritten(product, inputs, (2,), int8_linear)
    assert "its weight is no constant" in ctx.record.notes[0]


def with_points(x: Tensor, w: Tensor, scales: Tensor, points: Tensor) -> Tensor:
    rest = (scales, points, 0, -128, 127, torch.int8)
    return F.linear(dequantized(x), quantized.dequantize_per_channel.default(w, *rest))


class Shifted(torch.nn.Module):
    """A product whose weight was quantised with zero points."""

    def __init__(self, point: int) -> None:
        super().__init__()
        w, scales = weight_of(48, 64)
        for name, tensor in (("w", w), ("s", scales), ("p", torch.full((48,), point))):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return with_points(x, *self.buffers())


@pytest.mark.parametrize("point", [0, 3])
def test_a_weight_with_zero_points_is_multiplied_as_floats_and_says_so(point: int) -> None:
    model, x = Shifted(point), integers(torch.uint8, 9, 64)
    with torch.no_grad():
        found = stator.compile(model, freezing=True, strict=True, cache=False)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-4)
    record = stator.last_compilation()
    assert record is not None
    said = "mm is int8" if point == 0 else "mm is not int8: its weight has zero points other than 0"
    assert any(note.startswith(said) for note in record.notes)


def test_zero_points_that_come_with_later_weights_raise() -> None:
    """Whoever made the program has not seen them; oneDNN would leave them out."""
    points = torch.zeros(48, dtype=torch.int64)
    check(with_points, integers(torch.uint8, 9, 64), *weight_of(48, 64), points)
    with pytest.raises(RuntimeError, match="zero points"):
        check(with_points, integers(torch.uint8, 9, 64), *weight_of(48, 64), points + 3)


def test_nothing_to_multiply() -> None:
    def product(x: Tensor, w: Tensor, scales: Tensor, b: Tensor) -> Tensor:
        return F.linear(dequantized(x), dequantized_weight(w, scales), b)

    inputs = integers(torch.uint8, 0, 64), *weight_of(48, 64), torch.randn(48)
    _, ctx = rewritten(product, inputs, (1, 2, 3), int8_linear)
    assert "it is empty" in ctx.record.notes[0]
