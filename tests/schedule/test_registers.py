"""Kernels for a GPU: no member reads from memory what another one of its kernel wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.loops.ir import Accumulate, Store, loads_of
from stator.lower.lower import Lowering
from tests.lower.graphs import traced
from tests.schedule.programs import GPU, gpu_kernels

ROWS = (300, 64)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (64,)),
        lambda x: F.gelu(x + 1).softmax(-1) * x,
        lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1),
    ],
)
def test_rows_stay_in_registers(fn: Callable[[Tensor], Tensor]) -> None:
    (kernel,) = gpu_kernels(fn, torch.randn(ROWS))

    stored = {s.buffer for s in kernel.statements if isinstance(s, Store)}
    loaded = {load.buffer for s in kernel.statements for load in loads_of(s.value)}

    assert not kernel.scratch
    assert not stored & loaded
    assert len(stored) == 1  # what is between is nowhere


def test_the_index_of_what_is_gathered_stays_in_registers_too() -> None:
    def fn(x: Tensor) -> Tensor:
        grown = x.exp()
        return torch.take_along_dim(grown, (grown > 1).long(), 1)

    (kernel,) = gpu_kernels(fn, torch.randn(ROWS))

    (only_input,) = {load.buffer for s in kernel.statements for load in loads_of(s.value)}
    assert only_input.size.constant == 300 * 64
    assert only_input not in kernel.written


def test_sums_of_columns_are_cut_so_that_programs_fill_a_card() -> None:
    first, second = gpu_kernels(lambda x: x.sum(0), torch.randn(8192, 768))

    assert [axis.size.constant for axis in first.outer] == [128, 768]
    assert [axis.size.constant for axis in second.outer] == [768]


def test_pieces_of_two_sums_are_added_up_in_one_loop() -> None:
    """As the backward of a batch norm has them: the gradient is read once for both."""

    def fn(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return grad.sum((0, 2)), (grad * x).sum((0, 2))

    pieces, *_ = gpu_kernels(fn, torch.randn(16, 8, 4096), torch.randn(16, 8, 4096))

    loop, stores = pieces.stages
    assert len(loop.body) == len(stores.body) == 2
    assert not stores.inner


def test_a_result_is_stored_by_the_loop_that_sums_it() -> None:
    """Images of two axes, of which a sum makes one: they are the same points."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, total.sum((2, 3))

    images = torch.randn(1024, 64, 8, 8).to(memory_format=torch.channels_last)
    (kernel,) = gpu_kernels(fn, images, images.clone())

    loop, result = kernel.stages
    assert [type(s) for s in loop.body] == [Store, Accumulate]
    assert not result.inner


def test_a_formula_does_not_join_few_rows() -> None:
    kernels = gpu_kernels(lambda x: x - x.mean((0, 2), keepdim=True), torch.randn(16, 8, 4096))

    assert not kernels[-1].stages[0].inner  # element by element, by many programs


def test_scatters_visit_their_points_in_any_order() -> None:
    *_, scatter = gpu_kernels(
        lambda x, i, s: x.index_add(0, i, s),
        torch.randn(50, 8),
        torch.randint(0, 50, (20,)),
        torch.randn(20, 8),
    )

    assert not any(stage.inner for stage in scatter.stages)
    assert scatter.statements[0].combine is not None


def test_what_no_hardware_combines_is_left_to_torch() -> None:
    def fn(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return x.scatter_reduce(0, i, s, "prod")

    given = torch.randn(5, 8), torch.randint(0, 5, (3, 8)), torch.randn(3, 8)
    lowering = Lowering(traced(fn, *given), target=GPU)
    lowering.run()

    assert any("no atomic prod" in reason for reason in lowering.reasons.values())
