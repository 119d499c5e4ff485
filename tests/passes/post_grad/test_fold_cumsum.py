"""Running sums of one whole number become products; all others stay sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.fold_cumsum import fold_cumsum
from tests.parity import check
from tests.passes.joint.test_drop_noops import graph_of

aten = torch.ops.aten

Program = Callable[..., Any]


def folded(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = fold_cumsum(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="fold_cumsum")
    module.recompile()
    return count


FIRES: dict[str, Program] = {
    "vector": lambda x: aten.cumsum(aten.full([5], 3), 0),
    "rows": lambda x: aten.cumsum(aten.full([2, 3], 3), 1),
    "columns": lambda x: aten.cumsum(aten.full([2, 3, 4], -3), -2),
    "truth": lambda x: aten.cumsum(aten.full([4], True), 0),
    "widened": lambda x: aten.cumsum(aten.full([4], 3, dtype=torch.int8), 0),
    "wrapped around": lambda x: aten.cumsum(
        aten.full([9], 100, dtype=torch.int8), 0, dtype=torch.int8
    ),
    "ones": lambda x: aten.cumsum(aten.ones([4], dtype=torch.int64), 0),
    "empty": lambda x: aten.cumsum(aten.full([0], 3), 0),
}
SILENT: dict[str, Program] = {
    "floats": lambda x: aten.cumsum(aten.full([5], 0.1), 0),
    "cut off": lambda x: aten.cumsum(aten.full([5], 1.5), 0, dtype=torch.int64),
    "narrowed": lambda x: aten.cumsum(aten.full([5], 300), 0, dtype=torch.int8),
    "not one number": lambda x: aten.cumsum(x, 0),
    "no dimension": lambda x: aten.cumsum(aten.full([], 3), 0),
}


@pytest.mark.parametrize("fn", FIRES.values(), ids=FIRES.keys())
def test_a_sum_of_one_number_is_a_product(fn: Program) -> None:
    x = torch.randn(3)
    module = graph_of(fn, x)

    assert folded(module, fuel=0) == 0
    assert folded(module) == 1
    assert "cumsum" not in str(module.graph)
    ours, theirs = module(x), fn(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("fn", SILENT.values(), ids=SILENT.keys())
def test_any_other_stays(fn: Program) -> None:
    module = graph_of(fn, torch.randn(3))
    before = [str(node.format_node()) for node in module.graph.nodes]

    assert folded(module) == 0
    assert [str(node.format_node()) for node in module.graph.nodes] == before


def test_before_and_after() -> None:
    module = graph_of(lambda x: aten.cumsum(aten.full([5], 3), 0), torch.randn(3))
    assert folded(module) == 1
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert [f"{n.target}{n.args}" for n in calls] == [
        "aten.full.default([5], 3)",
        "aten.arange.default(5,)",
        "aten.add.Tensor(arange_default, 1)",
        "aten.mul.Tensor(add_tensor, full)",
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_is_eager_s(dynamic: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.ones(x.shape, dtype=torch.int64).cumsum(-1) - 1 + x

    check(fn, torch.randn(4, 3), dynamic=dynamic)
