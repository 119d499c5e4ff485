"""Nodes stand where fewer bytes live at once; what must not move does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import stator
from stator.core.events import Compilation, last_compilation
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.post_grad.reorder_for_memory import reorder_for_memory
from stator.patterns import fwd_only
from tests.parity import check
from tests.rules.tracing import targets, traced

Program = Callable[..., Any]

MM = "aten.mm.default"
SUM = "aten.sum.default"


def sums(x: Tensor, *weights: Tensor) -> Tensor:
    """All products, then the sum of each."""
    products = [x @ w for w in weights]
    return torch.stack([product.sum() for product in products])


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """Several networks of two layers, side by side."""
    first = [x @ w for w in weights]
    second = [y.relu() @ w for y, w in zip(first, weights, strict=True)]
    return sum((y.sum(0) for y in second), start=torch.zeros(()))


class Blocks(nn.Module):
    """Convolutions of several widths side by side, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(4))
        self.outer = nn.ModuleList(nn.Conv2d(64, 16, k, padding=k // 2) for k in (1, 3, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            inside = [convolve(x).relu() for convolve in self.inner]
            pairs = zip(inside, self.outer, strict=True)
            x = torch.cat([convolve(y).relu() for y, convolve in pairs], 1)
        return x


def operands(count: int = 8) -> tuple[Tensor, ...]:
    return torch.randn(256, 512), *(torch.randn(512, 512) / 20 for _ in range(count))


def reordered(module: fx.GraphModule, fuel: int | None = None) -> int:
    count = reorder_for_memory(module.graph, Ctx(fuel=Fuel(fuel)))
    verify(module.graph, after="reorder_for_memory")
    module.recompile()
    return count


def last() -> Compilation:
    record = last_compilation()
    assert record is not None
    return record


def planned_peak(program: Program, *inputs: Any, skip: tuple[str, ...] = ()) -> int:
    """Bytes that a call takes by the finished plan."""
    torch._dynamo.reset()
    with torch.no_grad():
        stator.compile(program, kernels=True, skip=skip)(*inputs)
    return last().peaks["forward"]


def test_a_product_is_read_before_the_next_is_made() -> None:
    module = traced(sums, *operands(2))
    assert targets(module)[:4] == [MM, MM, SUM, SUM]

    assert reordered(module) == 2
    assert targets(module)[:4] == [MM, SUM, MM, SUM]


@pytest.mark.parametrize(
    ("program", "inputs", "at_most"),
    [
        (sums, operands(), 0.3),
        (layers, operands(), 0.45),
        (Blocks().eval(), (torch.randn(2, 64, 32, 32),), 0.85),
    ],
    ids=["sums", "layers", "blocks"],
)
def test_the_plan_takes_less(program: Program, inputs: tuple[Tensor, ...], at_most: float) -> None:
    before = planned_peak(program, *inputs, skip=("reorder_for_memory",))

    assert planned_peak(program, *inputs) <= at_most * before
    assert any("nodes are reordered" in note for note in last().notes)
    with torch.no_grad():
        found = stator.compile(program, kernels=True)(*inputs)
        torch.testing.assert_close(found, program(*inputs), rtol=1e-3, atol=1e-3)


def test_gradients_stay_right() -> None:
    inputs = [x.requires_grad_() for x in operands()]
    check(layers, *inputs)


def test_a_chain_stays_as_it_is() -> None:
    module = traced(lambda x, w: ((x @ w).relu() @ w).softmax(-1), torch.randn(8, 8), torch.eye(8))
    before = str(module.graph)

    assert reordered(module) == 0
    assert str(module.graph) == before


def test_values_that_one_kernel_computes_in_passing_count_nothing() -> None:
    def program(x: Tensor) -> Tensor:
        parts = [(x + n).sin() for n in range(8)]
        return sum(parts, start=torch.zeros(()))

    assert reordered(traced(program, torch.randn(1000))) == 0


def test_without_fuel_nothing_changes() -> None:
    module = traced(sums, *operands(2))
    before = str(module.graph)

    assert reordered(module, fuel=0) == 0
    assert str(module.graph) == before


def test_nothing_moves_across_a_write() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x @ v, x @ w
        torch.ops.aten.copy_.default(state, one)
        return one.sum(), other.sum()

    module = traced(program, *operands(2), torch.zeros(256, 512))

    assert reordered(module) == 0


def test_nothing_moves_across_random_numbers() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = x @ v, x @ w
        noise = torch.rand(3)
        return one.sum(), other.sum(), noise

    assert reordered(fwd_only(program, operands(2))) == 0


def test_nothing_moves_across_an_assertion() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x @ v, x @ w
        torch.ops.aten._assert_async.msg((x[0, 0] < 100), "too large")
        return one.sum(), other.sum()

    assert reordered(traced(program, *operands(2))) == 0


def test_views_live_as_long_as_what_they_are_views_of() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (x @ v).t(), (x @ w).t()
        return one.sum(), other.sum()

    module = traced(program, *operands(2))

    assert reordered(module) > 0
    calls = targets(module)
    assert calls.index(SUM) < len(calls) - 1 - calls[::-1].index(MM)


def test_sizes_may_be_symbols() -> None:
    compiled = stator.compile(sums, kernels=True, dynamic=True)
    x, *weights = operands(4)

    for rows in (256, 100):
        torch.testing.assert_close(
            compiled(x[:rows], *weights), sums(x[:rows], *weights), rtol=1e-3, atol=1e-2
        )
    assert any("nodes are reordered" in note for note in last().notes)
