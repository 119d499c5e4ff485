"""Kernels of fused programs: they verify, and mean what the program does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stator.loops.access import nodes
from stator.loops.ir import Accumulate, Kernel, Load, Store
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.schedule import build
from tests.schedule.interpret import require_equal
from tests.schedule.programs import require_same, scheduled

Call = Callable[..., Any]

PROGRAMS: Final[dict[str, Call]] = {
    "pointwise": lambda x, y: (x + y).tanh() * 2,
    "softmax": lambda x, y: (x + y).softmax(-1),
    "softmax along columns": lambda x, y: x.softmax(0),
    "log softmax": lambda x, y: x.log_softmax(-1),
    "layer norm": lambda x, y: functional.layer_norm(x, x.shape[-1:]),
    "standardized columns": lambda x, y: (x - x.mean(0)) / (x.std(0) + 1),
    "row and its sum": lambda x, y: (x.exp(), x.exp().sum(-1)),
    "sums both ways": lambda x, y: (x.sum(0), x.sum(1)),
    "sum of all": lambda x, y: (x * y).sum(),
    "cumsum": lambda x, y: x.cumsum(-1),
    "cumsum of a softmax": lambda x, y: x.softmax(-1).cumsum(-1) * y,
    "cumsum along columns": lambda x, y: x.cumsum(0) + 1,
    "cat": lambda x, y: torch.cat([x, y.neg(), x], 1).exp(),
    "cat of rows": lambda x, y: torch.cat([x, y]) * 2,
    "transposed": lambda x, y: x.t() + y.t().exp(),
    "transposed sum": lambda x, y: (x.t() * 2).sum(0),
    "slices": lambda x, y: x[1:, ::2] + y[:-1, ::2],
    "maximum and place": lambda x, y: x.max(-1),
    "comparison": lambda x, y: torch.where(x > y, x, y.abs()),
    "gathered": lambda x, y: x.gather(1, (y.abs() * 0).long()),
}


def inputs(*size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(size, dtype=torch.float64).to(dtype) for _ in range(2))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_mean_what_the_program_does(name: str) -> None:
    require_same(PROGRAMS[name], *inputs(4, 6))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_unknown_sizes_mean_it_for_every_size(name: str) -> None:
    others = tuple(inputs(*size) for size in ((2, 3), (7, 2), (3, 9)))

    require_same(PROGRAMS[name], *inputs(4, 6), symbolic=True, others=others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softmax", "layer norm", "cat", "transposed", "cumsum"])
def test_kernels_of_other_types_mean_what_the_program_does(name: str, dtype: torch.dtype) -> None:
    require_same(PROGRAMS[name], *inputs(3, 5, dtype=dtype))


def test_what_is_gathered_may_say_where() -> None:
    """Both the index and what it is an index of are kept beside the row."""

    def fn(x: Tensor) -> Tensor:
        grown = x.exp()
        return torch.take_along_dim(grown, (grown > 1).long(), 1)

    require_same(fn, torch.randn(4, 6))


# Scratch: what only the row itself reads


def test_what_only_the_row_reads_stays_beside_it() -> None:
    kernel = scheduled(lambda x: x.softmax(-1), torch.empty(4, 24)).only

    (scratch,) = kernel.scratch
    assert scratch.size.constant == 24
    assert len(kernel.written) == 1


def test_what_others_read_too_goes_to_memory() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y / y.sum(-1, keepdim=True)

    kernel = scheduled(fn, torch.empty(4, 24)).only

    assert len(kernel.written) == 2


def test_a_row_too_long_to_stay_goes_to_memory() -> None:
    long = build.LARGEST_SCRATCH // 4 + 1
    kept = scheduled(lambda x: x.softmax(-1), torch.empty(16, long - 1)).only
    kernel = scheduled(lambda x: x.softmax(-1), torch.empty(16, long)).only

    assert len(kept.scratch) == 1
    assert not kernel.scratch
    assert len(kernel.written) == 2


def test_a_row_of_unknown_length_stays_by_its_hint() -> None:
    kernel = scheduled(lambda x: x.softmax(-1), torch.empty(4, 24), symbolic=True).only

    (scratch,) = kernel.scratch
    assert scratch.size.constant is None


def test_a_value_for_each_row_is_not_stored_unless_somebody_reads_it() -> None:
    def fn(x: Tensor) -> Any:
        mean = x.mean(-1, keepdim=True)
        return x - mean

    assert len(scheduled(fn, torch.empty(4, 24)).only.written) == 1
    assert len(scheduled(lambda x: (fn(x), x.mean(-1)), torch.empty(4, 24)).only.written) == 2


# Stages


def loops(kernel: Kernel) -> list[tuple[int, int]]:
    """Statements of each stage that accumulate, and that store."""
    return [
        (
            sum(isinstance(s, Accumulate) for s in stage.body),
            sum(isinstance(s, Store) for s in stage.body),
        )
        for stage in kernel.stages
    ]


def test_neighbours_over_the_same_points_share_a_loop() -> None:
    kernel = scheduled(lambda x: (x.sum(-1), x.amax(-1)), torch.empty(4, 24)).only

    assert loops(kernel) == [(2, 0), (0, 2)]


def test_a_loop_that_needs_the_total_comes_behind_it() -> None:
    kernel = scheduled(lambda x: x / x.sum(-1, keepdim=True), torch.empty(4, 24)).only

    assert loops(kernel) == [(1, 0), (0, 1)]


def test_a_merged_loop_does_not_load_what_it_just_computed() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y * 2 + y

    kernel = scheduled(fn, torch.empty(4, 24)).only

    loaded = {n.buffer for s in kernel.statements for n in nodes(s) if isinstance(n, Load)}
    assert loaded.isdisjoint(kernel.written)


# Loops that become one although stores of totals stand between

BUFFERS: Final = """
kernel k
  buffer x: f32[240]
  buffer row: f32[24]
  buffer first: f32[10]
  buffer second: f32[10]
  buffer place: i64[10]
  outer i0: 10
"""
LOOP: Final = "  stage i1: 24\n    acc0 sum= x[24*i0 + i1]\n"
STORE: Final = "  stage\n    first[i0] = acc0\n"


def merged(body: str) -> Kernel:
    """The kernel with its stages merged; verified, and what it computes is the same."""
    before = parse(BUFFERS + body)
    after = replace(before, stages=tuple(build.merged_stages(list(before.stages))))
    require_equal(before, after)
    return after


def test_loops_become_one_across_stores_of_totals() -> None:
    own = "  stage i2: 24\n    acc1 max= mul(x[24*i0 + i2], row[i2])\n"
    kernel = merged(LOOP + STORE + own + "  stage\n    second[i0] = acc1\n")

    assert loops(kernel) == [(2, 0), (0, 2)]
    assert "acc1 max= mul(x[24*i0 + i1], row[i1])" in to_text(kernel)


def test_what_stands_between_keeps_its_order() -> None:
    more = "  stage\n    second[i0] = mul(acc0, first[i0])\n"
    kernel = merged(LOOP + STORE + more + "  stage i2: 24\n    acc1 sum= row[i2]\n")

    assert loops(kernel) == [(2, 0), (0, 2)]
    assert list(kernel.stages[1].body) == [s for s in kernel.statements if isinstance(s, Store)]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param("  stage i2: 24\n    acc1 sum= sub(x[24*i0 + i2], acc0)", id="its total"),
        pytest.param("  stage i2: 24\n    acc1 sum= sub(x[i2], first[i0])", id="a stored total"),
        pytest.param("  stage i2: 24\n    acc1 sum= x[([place[i0]] % 240)]", id="a stored place"),
        pytest.param(
            "  stage i2: 24\n    acc1 sum= x[24*i0 + i2]\n    first[(i2 % 10)] = row[i2]",
            id="store",
        ),
        pytest.param("  stage i2: 12\n    acc1 sum= x[24*i0 + i2]", id="other points"),
        pytest.param("  scan i2: 24\n    acc1 sum= x[24*i0 + i2]", id="in order"),
        pytest.param("  stage i2: 24\n    x[24*i0 + i2] = row[i2]", id="adds nothing up"),
    ],
)
def test_a_loop_stays_behind_what_it_needs(second: str) -> None:
    stores = STORE + "    place[i0] = i64(acc0)\n"
    stages = list(parse(BUFFERS + LOOP + stores + second + "\n").stages)

    assert build.merged_stages(stages) == stages


def test_a_loop_does_not_write_before_the_old_value_was_read() -> None:
    reads = "  stage\n    first[i0] = x[24*i0]\n"
    writes = "  stage i2: 24\n    acc1 sum= row[i2]\n    x[24*i0 + i2] = row[i2]\n"
    stages = list(parse(BUFFERS + LOOP + reads + writes).stages)

    assert build.merged_stages(stages) == stages


def test_a_loop_stays_behind_an_accumulator_that_has_no_loop() -> None:
    alone = "  stage\n    acc1 sum= x[24*i0]\n"
    stages = list(parse(BUFFERS + LOOP + alone + "  stage i2: 24\n    acc2 sum= acc1\n").stages)

    assert build.merged_stages(stages) == stages


def test_sums_of_which_one_is_a_result_share_a_loop() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sum(-1), x.sum(-1).exp() + y.amax(-1)

    kernel = require_same(fn, *inputs(4, 24)).only

    assert loops(kernel)[0] == (3, 0)


def test_the_last_axis_is_that_along_which_results_lie() -> None:
    kernel = scheduled(lambda x, y: x + y.t().t(), *(torch.empty(24, 8).t() for _ in range(2))).only

    (store,) = kernel.statements
    assert isinstance(store, Store)
    step = store.index.factor_of(kernel.outer[-1])
    assert step is not None
    assert step.constant == 1


def test_a_flat_program_is_one_loop() -> None:
    kernel = scheduled(lambda x, y: x * y + 1, *(torch.empty(3, 4, 5) for _ in range(2))).only

    (axis,) = kernel.outer
    assert axis.size.constant == 60
    assert loops(kernel) == [(0, 1)]
