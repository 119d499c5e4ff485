"""Sums are as exact as eager's: short ones are rounded once, long ones taken in parts."""

from __future__ import annotations

import re
from collections.abc import Callable

import llvmlite.binding as llvm
import pytest
import torch
from torch import Tensor

from stator.codegen.llvm import jit
from stator.codegen.llvm.sums import SHORT
from stator.codegen.llvm.writer import numbered
from stator.core.dtypes import DType
from stator.loops.index import Axis, Index
from stator.loops.ir import Accumulate, Accumulated, Buffer, Combine, Kernel, Load, Stage, Store
from tests.parity import check, compiled

HAS_VECTORS = llvm.get_host_cpu_features().get("avx512f")


def _rows(length: int, count: int = 200) -> Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(length))


# Ends of vectors, of the steps of a loop, of chunks, of stretches.
@pytest.mark.parametrize("length", [2, 7, 8, 15, 50, 100, SHORT])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_short_sum_is_rounded_once(length: int, dim: int) -> None:
    x = _rows(length) if dim == 1 else _rows(length).T.contiguous()
    ours = compiled(lambda x: x.sum(dim), dynamic=False)(x)

    assert torch.equal(ours, x.double().sum(dim).float())


@pytest.mark.parametrize("length", [SHORT + 1, 300, 700, 1023, 1025, 1088, 2100, 5000])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_long_sum_is_as_exact_as_eagers(length: int, dim: int) -> None:
    x = _rows(length) if dim == 1 else _rows(length).T.contiguous()
    check(lambda x: x.sum(dim), x, dynamic=False)


@pytest.mark.parametrize(
    ("size", "dims"),
    [((16, 64, 197), (0, 2)), ((1000, 16, 3), (0, 2)), ((8, 197, 64), (0, 1)), ((90, 1100), ())],
)
def test_a_sum_over_several_dimensions_is_as_exact_as_eagers(
    size: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    check(lambda x: x.sum(dims), x, dynamic=False)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
def test_running_totals_are_as_exact_as_eagers(scan: Callable[[Tensor, int], Tensor]) -> None:
    check(lambda x: scan(x, 1), 1 + 0.01 * _rows(1000, 20), dynamic=False)


def test_infinities_and_nan_go_through_sums() -> None:
    x = _rows(100, 4)
    x[0, 3], x[1, 5], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    check(lambda x: (x.sum(1), x.sum(0)), x, dynamic=False)


def _sum_of_rows(length: int) -> Kernel:
    row, column = Axis("i0", Index.of(8)), Axis("i1", Index.of(length))
    source, sums = Buffer("x", DType.F32, Index.of(8 * length)), Buffer("y", DType.F32, Index.of(8))
    element = Load(DType.F32, source, Index.of(row) * length + Index.of(column))
    total = Accumulated(DType.F32, "total")
    stages = (
        Stage((column,), (Accumulate("total", Combine.SUM, element),)),
        Stage((), (Store(sums, Index.of(row), total),)),
    )
    return Kernel("sums", (row,), stages)


@pytest.mark.skipif(not HAS_VECTORS, reason="the processor has no vectors of 512 bits")
@pytest.mark.parametrize("length", [16, 20, 50, 100, 768])
def test_a_sum_of_known_length_becomes_vectors(length: int) -> None:
    code = jit.assembly([_sum_of_rows(length)])
    scalar = re.findall(r"\bv?adds[sd]\b", code)

    assert "zmm" in code
    # What fills no vector, and the last steps of adding the lanes up, in two copies of the loops.
    assert len(scalar) <= 2 * (length % 16 + 4)


def test_marks_of_loops_are_numbered() -> None:
    text = numbered("br !{lanes:16x4}\nbr !{lanes:0x1}\nbr !{lanes:8x1}")

    assert text.splitlines()[:3] == ["br !0", "br !1", "br !2"]
    notes = text.splitlines()[3:]
    assert ["unroll.disable" in note for note in notes] == [True, False, True]
    assert ['vectorize.width", i32 16' in note for note in notes] == [True, False, False]
    assert ['interleave.count", i32 4' in note for note in notes] == [True, False, False]
