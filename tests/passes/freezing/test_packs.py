"""Packed products and convolutions: when, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stator
from stator.ops.libraries import mkl_linear, onednn_linear
from stator.passes.freezing.pack_convolution import pack_convolution
from stator.passes.freezing.pack_linear import pack_linear
from tests.passes.freezing.accuracy import folded, is_as_exact
from tests.passes.freezing.graphs import rewritten, run_with_constants
from tests.passes.freezing.ways import expected_ways

pytestmark = pytest.mark.skipif(onednn_linear() is None, reason="torch has no oneDNN here")


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def without_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w.t()


def lying_otherwise(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def called(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("way", ["MKL", "oneDNN"])
@pytest.mark.parametrize("fn", [linear, without_bias, lying_otherwise])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_products_read_packed_weights(fn: object, way: str, frozen: bool, rows: int) -> None:
    if way == "MKL" and mkl_linear() is None:
        pytest.skip("torch has no MKL here")
    assert callable(fn)
    x, w, b = torch.randn(rows, 256), torch.randn(256, 256), torch.randn(256)
    with expected_ways(named=way):
        module, ctx = rewritten(fn, (x, w, b), (1, 2), pack_linear)
    assert f"packed by {way}" in ctx.record.notes[0]
    found, constants = run_with_constants(module, (x, w, b), frozen=frozen)

    assert any("linear_weight" in recipe.text for recipe in constants.recipes)
    torch.testing.assert_close(found[0], fn(x, w, b), rtol=1e-5, atol=1e-4)
    # Of one row alone torch multiplies by another function, which makes smaller errors.
    of_several = fn(x.repeat(7, 1), w, b)[:rows]
    assert is_as_exact(found[0], of_several, fn(x.double(), w.double(), b.double()))


@pytest.mark.parametrize(
    ("x", "w", "weights", "reason"),
    [
        (torch.randn(4, 64), torch.randn(64, 64), (1, 2), "small"),
        (torch.randn(4, 512).double(), torch.randn(256, 512).double(), (1, 2), "one type"),
        (torch.randn(512, 4).t(), torch.randn(256, 512), (1, 2), "one behind the other"),
        (torch.randn(0, 512), torch.randn(256, 512), (1, 2), "small"),
    ],
)
def test_what_is_not_packed_says_why(
    x: Tensor, w: Tensor, weights: tuple[int, ...], reason: str
) -> None:
    b = torch.randn(w.size(0), dtype=x.dtype)
    with expected_ways():
        module, ctx = rewritten(linear, (x, w, b), weights, pack_linear)
    assert reason in ctx.record.notes[0]
    assert not any("_linear" in name for name in called(module))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, w: torch.bmm(x, w), "no batches of matrices"),
        (lambda x, w: torch.baddbmm(w[:, :1], x, w), "no batches of matrices"),
        (lambda x, w: torch.addmm(w[0, 0], x[0], w[1], beta=2), "its parts are scaled"),
        (lambda x, w: torch.addmm(x[0], x[1], w[0]), "what it adds is no row"),
        (lambda x, w: torch.addmm(w[0, 0, :1], x[1], w[1]), "what it adds is no row"),
    ],
)
def test_other_products_with_weights_say_why_they_are_not_packed(
    fn: Callable[..., Tensor], reason: str
) -> None:
    given = torch.randn(4, 8, 256), torch.randn(4, 256, 256)
    _, ctx = rewritten(fn, given, (1,), pack_linear)

    assert len(ctx.record.notes) == 1
    assert reason in ctx.record.notes[0]
    assert not rewritten(fn, given, (), pack_linear)[1].record.notes, "it reads no weight"


def test_a_matrix_that_is_no_weight_is_left_alone() -> None:
    with expected_ways():
        _, ctx = rewritten(
            linear, (torch.randn(4, 512), torch.randn(256, 512), torch.randn(256)), (), pack_linear
        )
    assert not ctx.record.notes


def test_what_is_slower_packed_stays_and_says_so() -> None:
    with expected_ways(named="plain"):
        module, ctx = rewritten(
            linear,
            (torch.randn(4, 512), torch.randn(256, 512), torch.randn(256)),
            (1, 2),
            pack_linear,
        )
    assert "no faster" in ctx.record.notes[0]
    assert "aten.addmm.default" in called(module)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_read_packed_weights(
    groups: int, layout: torch.memory_format, biased: bool, dtype: torch.dtype
) -> None:
    def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b if biased else None, stride=2, padding=1, groups=groups)

    x = torch.randn(2, 8, 15, 14).to(dtype).contiguous(memory_format=layout)
    w, b = torch.randn(16, 8 // groups, 3, 3).to(dtype), torch.randn(16).to(dtype)
    with expected_ways():
        calls, (note,) = folded(convolved, (x, w, b), pack_convolution)

    assert "packed by oneDNN" in note
    assert calls[0] == "mkldnn._convolution_pointwise.default"


@pytest.mark.parametrize(
    ("channels", "is_last", "measured"), [(64, True, 0), (4, True, 1), (64, False, 1)]
)
def test_a_convolution_that_gains_surely_is_not_measured(
    channels: int, is_last: bool, measured: int
) -> None:
    x = torch.randn(2, channels, 16, 16)
    x = x.to(memory_format=torch.channels_last) if is_last else x
    w = torch.randn(channels, channels, 3, 3)

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1)

    with patch("stator.passes.freezing.pack_convolution.fastest", return_value=("packed", {})) as f:
        calls, (note,) = folded(convolved, (x, w), pack_convolution)
    assert f.call_count == measured
    assert calls[0] == "mkldnn._convolution_pointwise.default"
    assert note.endswith("reads its weight packed by oneDNN")


def as_it_is(image: Tensor) -> Tensor:
    return image


@pytest.mark.parametrize("size", [(1, 1, 9, 8), (2, 4, 5, 6), (2, 4, 1, 9)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("behind", [as_it_is, F.gelu])
@pytest.mark.parametrize("freezing", [False, True])
def test_a_packed_convolution_gives_its_image_as_eager_lays_it_out(
    size: tuple[int, ...],
    layout: torch.memory_format,
    behind: Callable[[Tensor], Tensor],
    freezing: bool,
) -> None:
    window = torch.nn.Conv2d(size[1], size[1], (min(size[2], 3), 3)).eval()
    x = torch.randn(size).contiguous(memory_format=layout)
    torch._dynamo.reset()
    with torch.no_grad(), expected_ways():
        eager, found = (
            behind(window(x)),
            stator.compile(lambda image: behind(window(image)), freezing=freezing, cache=False)(x),
        )
    torch.testing.assert_close(found, eager, check_stride=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": (3, 2), "padding": (0, 1), "output_padding": (2, 0)},
        {"stride": 2, "groups": 4},
        {"stride": 2, "groups": 8},
        {"dilation": 2},
        {"stride": 2, "padding": 4},  # more than the window: its result is smaller
    ],
)
def test_transposed_convolutions_read_packed_weights(
    shape: dict[str, Any], biased: bool, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, b if biased else None, **shape)

    x = torch.randn(2, 8, 9, 7).to(dtype).contiguous(memory_format=layout)
    groups = shape.get("groups", 1)
    w, b = torch.randn(8, 16 // groups, 3, 3).to(dtype), torch.randn(16).to(dtype)
    with expected_ways():
        calls, (note,) = folded(convolved, (x, w, b), pack_convolution)

    assert "packed by oneDNN" in note
    assert calls[0] == "mkldnn._convolution_transpose_pointwise.default"


@pytest.mark.parametrize(
    ("size", "shape", "reason"),
    [
        ((1, 4, 5, 5), {"dilation": 3, "output_padding": 2}, "padded by a stride"),
        ((1, 4, 5, 5, 5), {}, "not one of images"),
        ((1, 4, 5), {}, "not one of images"),
    ],
)
def test_a_transposed_convolution_that_is_not_packed_says_why(
    size: tuple[int, ...], shape: dict[str, Any], reason: str
) -> None:
    window = (4, 3, *[3] * (len(size) - 2))
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(size) - 2]
    with expected_ways():
        calls, (note,) = folded(
            lambda x, w: function(x, w, **shape),
            (torch.randn(size), torch.randn(window)),
            pack_convolution,
        )
    assert reason in note
    assert calls == ["aten.convolution.default"]


@pytest.mark.parametrize("freezing", [False, True])
def test_new_weights_of_a_transposed_convolution_are_packed_anew(freezing: bool) -> None:
    window = torch.nn.ConvTranspose2d(8, 8, 3, stride=2).eval()
    x, new = torch.randn(2, 8, 9, 7), torch.randn(8, 8, 3, 3)
    with torch.no_grad(), expected_ways():
        compiled = stator.compile(window, freezing=freezing, cache=False)
        torch.testing.assert_close(compiled(x), window(x), check_stride=True)
        if freezing:
            stator.update_weights(compiled, {"weight": new})
        else:
            window.weight.copy_(new)
        expected = F.conv_transpose2d(x, new, window.bias, stride=2)
        torch.testing.assert_close(compiled(x), expected, check_stride=True)


def test_a_bias_that_a_kernel_can_add_in_passing_is_not_laid_out_by_mkl() -> None:
    if mkl_linear() is None:
        pytest.skip("torch has no MKL here")
    arguments = (torch.randn(4, 512), torch.randn(256, 512), torch.randn(256))

    def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b).view(2, 2, 256).relu()

    for fn, names in ((activated, ["aten.add.Tensor"]), (linear, [])):
        with expected_ways(named="MKL"):
            module, _ = rewritten(fn, arguments, (1, 2), pack_linear)
        assert [name for name in called(module) if "add" in name] == names
        found, _ = run_with_constants(module, arguments)
        torch.testing.assert_close(found[0], fn(*arguments), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_are_packed_by_onednn(dtype: torch.dtype) -> None:
    arguments = tuple(t.to(dtype) for t in (torch.randn(4, 512), torch.randn(256, 512)))
    arguments = (*arguments, torch.randn(256).to(dtype))
    with expected_ways():
        module, ctx = rewritten(linear, arguments, (1, 2), pack_linear)
    if "not packed" in ctx.record.notes[0]:
        pytest.skip("oneDNN does not multiply them here")
    assert "packed by oneDNN" in ctx.record.notes[0]
    found, _ = run_with_constants(module, arguments)
    torch.testing.assert_close(found[0], linear(*arguments), rtol=2e-2, atol=0.2)
