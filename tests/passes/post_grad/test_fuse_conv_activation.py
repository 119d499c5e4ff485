"""Convolutions apply the activation behind them where that pays; both verdicts have a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.ops.libraries import onednn_convolution
from stator.passes.post_grad.fuse_conv_activation import fuse_conv_activation
from tests.passes.freezing.accuracy import is_as_exact
from tests.rules.tracing import targets, traced

pytestmark = pytest.mark.skipif(onednn_convolution() is None, reason="torch has no oneDNN here")

Program = Callable[..., Any]
FUSED = "mkldnn._convolution_pointwise.default"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": F.leaky_relu,
    "leaky_relu, steep": lambda x: F.leaky_relu(x, 0.2),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def operands(channels: int = 3, side: int = 64, width: int = 64, window: int = 3) -> list[Tensor]:
    weight = torch.randn(width, channels, window, window) / 4
    return [torch.randn(1, channels, side, side), weight, torch.randn(width)]


def passed(
    program: Program, *inputs: Tensor, fuel: int | None = None
) -> tuple[fx.GraphModule, Ctx]:
    module, ctx = traced(program, *inputs), Ctx(fuel=Fuel(fuel))
    fuse_conv_activation(module.graph, ctx)
    verify(module.graph, after="fuse_conv_activation")
    module.recompile()
    return module, ctx


def silu_behind(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, w, bias, padding=1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_both_are_one_call_and_the_result_is_eager_s(
    name: str, layout: torch.memory_format
) -> None:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.conv2d(x, w, bias, stride=1, padding=1))

    x, w, bias = operands()
    x[0, 0, 3, 3], x[0, 0, 9, 9] = float("nan"), float("inf")
    inputs = x.to(memory_format=layout), w, bias
    module, _ = passed(program, *inputs)

    assert targets(module) == [FUSED]
    found, expected = module(*inputs), program(*inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_both_in_one_are_as_exact_as_one_after_the_other(name: str) -> None:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.conv2d(x, w, bias, padding=1))

    inputs = operands()
    found = passed(program, *inputs)[0](*inputs)
    assert is_as_exact(found, program(*inputs), program(*(one.double() for one in inputs)))


def test_compiled_it_is_eager_s() -> None:
    inputs = operands()
    with torch.no_grad():
        found = stator.compile(silu_behind, kernels=True)(*inputs)
    torch.testing.assert_close(found, silu_behind(*inputs))


def test_strides_padding_and_dilation_go_along() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(x, w, None, stride=(2, 1), padding=(0, 3), dilation=(1, 2)))

    x, w, _ = operands(side=100)
    module, _ = passed(program, x, w)

    assert targets(module) == [FUSED]
    torch.testing.assert_close(module(x, w), program(x, w))


SILENT: dict[str, tuple[Program, list[Tensor], str]] = {
    "slope 0": (
        lambda x, w, b: F.leaky_relu(F.conv2d(x, w, b, padding=1), 0.0),
        operands(),
        "makes 0 of NaN",
    ),
    "small": (silu_behind, operands(side=16), "small"),
    "deep": (silu_behind, operands(channels=256), "2304 products"),
    "read by a kernel": (lambda *given: silu_behind(*given) + 1, operands(), "in passing"),
    "in groups": (
        lambda x, w, b: F.silu(F.conv2d(x, w[:, :1], b[:63].repeat(2)[:63], groups=3)),
        [operands()[0], torch.randn(63, 1, 3, 3), torch.randn(63)],
        "plain",
    ),
    "doubles": (silu_behind, [x.double() for x in operands()], "float32"),
    "in an order of its own": (
        lambda x, w, b: silu_behind(x.transpose(2, 3), w, b),
        operands(),
        "order of its own",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_all_others_stay_for_a_reason(name: str) -> None:
    program, inputs, reason = SILENT[name]
    module, ctx = passed(program, *inputs)

    assert FUSED not in targets(module)
    assert any(reason in note for note in ctx.record.notes)


def test_what_others_read_of_the_convolution_stays() -> None:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, w, bias, padding=1)
        return y, F.silu(y)

    module, ctx = passed(program, *operands())
    assert FUSED not in targets(module)
    assert ctx.record.notes == ["silu is not inside of convolution: others read convolution, too"]


@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.gelu, F.hardswish])
def test_what_onednn_computes_otherwise_stays_and_says_so(
    activation: Callable[[Tensor], Tensor],
) -> None:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return activation(F.conv2d(x, w, bias, padding=1))

    module, ctx = passed(program, *operands())
    assert FUSED not in targets(module)
    assert len(ctx.record.notes) == 1
    assert "is not inside of convolution: oneDNN's makes" in ctx.record.notes[0]
    assert passed(program, *operands(side=16))[1].record.notes == [], "small, it would gain nothing"


def test_without_fuel_nothing_changes() -> None:
    module, ctx = passed(silu_behind, *operands(), fuel=0)

    assert FUSED not in targets(module)
    assert ctx.record.notes == []
