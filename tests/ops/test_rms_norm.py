"""RMS norm as one operator, which GPUs have: its kernels against its parts, computed by torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

from stator.graph.run import Ctx
from stator.options import Options
from stator.pipeline import compile_half
from stator.torch_api import FakeTensorMode
from tests.ops.fused import FLOATS

aten = torch.ops.aten
FORWARD: Final = aten._fused_rms_norm.default
BACKWARD: Final = aten._fused_rms_norm_backward.default
CLOSE: Final = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


def parts(target: Any) -> Callable[..., Any]:
    """The operator, spelled out in others."""
    spelled: Callable[..., Any] = decomposition_table[target]
    return spelled


def by_kernels(target: Any, *arguments: Any) -> list[Tensor]:
    """What kernels make of one call of the operator: the results that there are."""
    mode, graph = FakeTensorMode(), fx.Graph()
    given: list[Any] = []
    for number, value in enumerate(arguments):
        given.append(value)
        if isinstance(value, Tensor):
            given[-1] = graph.placeholder(f"x{number}")
            given[-1].meta["val"] = mode.from_tensor(value)
    call = graph.call_function(target, tuple(given))
    with mode:
        call.meta["val"] = parts(target)(*fx.map_arg(given, lambda node: node.meta["val"]))
    results = []
    for number, value in enumerate(call.meta["val"]):
        if value is not None:
            results.append(graph.call_function(operator.getitem, (call, number)))
            results[-1].meta["val"] = value
    graph.output(tuple(results))
    ctx = Ctx(Options(strict=True))
    compiled = compile_half(fx.GraphModule({}, graph), "forward", ctx)
    assert ctx.record.called == []
    return list(compiled.run([value for value in arguments if isinstance(value, Tensor)]))


def check(target: Any, *arguments: Any) -> None:
    found = by_kernels(target, *arguments)
    expected = [value for value in parts(target)(*arguments) if value is not None]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        close = CLOSE[arguments[0].dtype]
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


SIZES: Final = {"rows": ((6, 50), (50,)), "images": ((2, 3, 8, 9), (8, 9)), "all": ((40,), (40,))}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_forward(name: str, dtype: torch.dtype, eps: float | None, is_weighted: bool) -> None:
    size, shape = SIZES[name]
    weight = torch.randn(shape, dtype=dtype) if is_weighted else None

    check(FORWARD, torch.randn(size, dtype=dtype), list(shape), weight, eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("wanted", [[True, True], [True, False], [False, True]])
def test_backward(name: str, dtype: torch.dtype, wanted: list[bool]) -> None:
    size, shape = SIZES[name]
    x, grad = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    weight = torch.randn(shape, dtype=dtype)
    rstd = parts(FORWARD)(x, list(shape), weight, None)[1]

    check(BACKWARD, grad, x, list(shape), rstd, weight, wanted)


def test_backward_without_a_weight() -> None:
    x, grad = torch.randn(6, 50), torch.randn(6, 50)
    rstd = parts(FORWARD)(x, [50], None, None)[1]

    check(BACKWARD, grad, x, [50], rstd, None, [True, False])
