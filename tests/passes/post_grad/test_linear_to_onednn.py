"""Products with large weights that lie by rows go to oneDNN; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.ops.libraries import onednn_linear
from stator.passes.post_grad.linear_to_onednn import LARGE_WEIGHT, linear_to_onednn

pytestmark = pytest.mark.skipif(onednn_linear() is None, reason="torch has no oneDNN here")

aten = torch.ops.aten

DEPTH = 512
WIDTH = LARGE_WEIGHT // DEPTH

Program = Callable[..., Any]


def graph_of(fn: Program, *inputs: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*inputs)
    return module


def rewritten(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = linear_to_onednn(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="linear_to_onednn")
    module.recompile()
    return count


def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = aten.addmm(bias, x, aten.t(weight))
    return result


def without_bias(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = aten.mm(x, aten.t(weight))
    return result


def operands(rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, DEPTH), torch.randn(WIDTH, DEPTH), torch.randn(WIDTH)


def test_both_products_are_rewritten_and_give_the_same() -> None:
    for fn, inputs in ((with_bias, operands()), (without_bias, operands()[:2])):
        module = graph_of(fn, *inputs)

        assert rewritten(module) == 1
        ours, expected = module(*inputs), fn(*inputs)
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def strided(size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    return torch.empty_strided(size, stride).normal_()


STAYS: dict[str, tuple[Program, tuple[Tensor, ...]]] = {
    "one row": (with_bias, operands(1)),
    "thousands of rows": (with_bias, operands(2000)),
    "a small weight": (without_bias, (torch.randn(16, DEPTH), torch.randn(64, DEPTH))),
    "a weight by columns": (
        without_bias,
        (torch.randn(16, DEPTH), strided((WIDTH, DEPTH), (1, WIDTH))),
    ),
    "rows with gaps": (
        without_bias,
        (strided((16, DEPTH), (2 * DEPTH, 1)), torch.randn(WIDTH, DEPTH)),
    ),
    "a bias for each element": (with_bias, (*operands()[:2], torch.randn(16, WIDTH))),
    "f64": (without_bias, tuple(t.double() for t in operands()[:2])),
    "scaled": (
        lambda x, w, b: aten.addmm(b, x, aten.t(w), beta=2),
        operands(),
    ),
}


@pytest.mark.parametrize(("fn", "inputs"), STAYS.values(), ids=STAYS.keys())
def test_any_other_product_stays(fn: Program, inputs: tuple[Tensor, ...]) -> None:
    module = graph_of(fn, *inputs)
    before = str(module.graph)

    assert rewritten(module) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    module = graph_of(with_bias, *operands())
    before = str(module.graph)

    assert rewritten(module, fuel=0) == 0
    assert str(module.graph) == before


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # setting the flags warns of GPUs
def test_where_onednn_is_switched_off_nothing_changes() -> None:
    module = graph_of(with_bias, *operands())

    with torch.backends.mkldnn.flags(enabled=False):
        assert rewritten(module) == 0
