"""Which blocks the model gives a kernel."""

from __future__ import annotations

import pytest

from stator.codegen.triton.kernel import source_of, write_kernel
from stator.codegen.triton.shape import AT_A_TIME, FEWEST_PROGRAMS, is_wide, shape_of
from stator.loops.ir import Kernel
from stator.loops.parse import parse

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from tests.codegen.triton.assembly import needs_disassembler, operations

COLUMNS = """
kernel columns
  buffer x: {dtype}[{all}]
  buffer y: {dtype}[{rows}]
  outer i0: {rows}
  stage i1: {length}
    acc0 sum= x[i0 + {rows}*i1]
  stage
    y[i0] = acc0
"""

TWO_SUMS = """
kernel two_sums
  buffer x: bf16[{all}]
  buffer y: f64[{rows}]
  buffer z: f64[{rows}]
  outer i0: {rows}
  stage i1: {length}
    acc0 sum= f64(x[i0 + {rows}*i1])
    acc1 sum= mul(f64(x[i0 + {rows}*i1]), f64(x[i0 + {rows}*i1]))
  stage
    y[i0] = acc0
    z[i0] = acc1
"""

COUNT = """
kernel count
  buffer y: i64[100]
  outer i0: 100
  stage
    y[i0] = value(i0 {first})
"""

LONG = """
kernel long
  buffer x: f32[{all}]
  buffer y: f32[{results}]
  outer i0: {rows}
  stage i1: {length}
    acc0 sum= x[{length}*i0 + i1]
  {then}
"""
SCALED = """
kernel scaled
  buffer x: {dtype}[{all}]
  buffer w: {dtype}[{length}]
  buffer y: {dtype}[{all}]
  outer i0: {rows}
  stage i1: {length}
    acc0 sum= x[{length}*i0 + i1]
  stage i2: {length}
    y[{length}*i0 + i2] = mul(sub(x[{length}*i0 + i2], acc0), w[i2])
"""
TOTAL = "stage\n    y[i0] = acc0"
SHARES = "stage i2: {length}\n    y[{length}*i0 + i2] = div(x[{length}*i0 + i2], acc0)"


def kernel_of(text: str, rows: int, length: int, dtype: str = "f64") -> Kernel:
    return parse(text.format(rows=rows, length=length, all=rows * length, dtype=dtype))


def long(rows: int, length: int, *, shares: bool = False) -> Kernel:
    """Rows that are summed; with `shares`, and divided by their sums."""
    then = (SHARES if shares else TOTAL).format(length=length)
    results = rows * length if shares else rows
    text = LONG.format(rows=rows, length=length, all=rows * length, results=results, then=then)
    return parse(text)


@pytest.mark.parametrize(("rows", "across"), [(64, 4), (1024, 8), (2048, 16), (1 << 16, 64)])
def test_few_columns_are_cut_into_slender_blocks(rows: int, across: int) -> None:
    """So that a hundred programs and more run, each memory access being whole."""
    shape = shape_of(kernel_of(COLUMNS, rows, 256))

    assert shape.outer == across
    assert rows // shape.outer >= FEWEST_PROGRAMS or across * 8 == 32


@pytest.mark.parametrize(
    ("rows", "length", "columns"),
    [
        (1 << 20, 4, 1024),
        (1 << 18, 4, 512),
        (1 << 20, 5, 1024),
        (1 << 20, 16, 64),
        (1 << 14, 4, 64),
    ],
)
def test_short_columns_are_one_threads(rows: int, length: int, columns: int) -> None:
    assert shape_of(kernel_of(COLUMNS, rows, length, "bf16")).outer == columns


@needs_disassembler
def test_short_columns_are_read_16_bytes_at_a_time_and_summed_in_registers() -> None:
    kernel = kernel_of(COLUMNS, 1 << 20, 4, "bf16")
    (cubin,) = compile_all([write_kernel(kernel, shape_of(kernel))], 90)

    found = operations(cubin.code)

    assert cubin.shared == 0
    assert [name for name in found if name.startswith("LDG")] == 4 * ["LDG.E.128"]
    assert found.count("STG.E.128") == 1


def test_columns_of_half_precision_stay_as_wide_as_an_access() -> None:
    shape = shape_of(kernel_of(COLUMNS, 64, 256, "bf16"))

    assert shape.outer * 2 == 32


def test_several_wide_sums_take_fewer_elements_at_a_time() -> None:
    kernel = kernel_of(TWO_SUMS, 1 << 14, 1000)

    assert (shape_of(kernel).outer, shape_of(kernel).inner) == (64, 8)


def test_sums_of_whole_numbers_take_as_many_elements_as_others() -> None:
    whole = TWO_SUMS.replace("f64", "i64").replace("bf16", "i32")

    assert shape_of(kernel_of(whole, 1 << 14, 1000)).inner == AT_A_TIME


@pytest.mark.parametrize("first", ["- 3000000000", "+ 3000000000"])
def test_numbers_beyond_32_bits_have_64_either_way(first: str) -> None:
    kernel = parse(COUNT.format(first=first))

    assert is_wide(kernel)
    assert not is_wide(parse(COUNT.format(first="- 3000")))


def test_rows_that_are_only_summed_have_many_warps() -> None:
    assert shape_of(long(1 << 12, 1 << 15)).warps == 16
    assert shape_of(long(1 << 12, 1 << 15, shares=True)).warps == 4


@pytest.mark.parametrize(
    ("dtype", "length", "warps"),
    [("bf16", 768, 4), ("bf16", 304, 2), ("bf16", 100, 4), ("f32", 768, 8), ("f32", 304, 4)],
)
def test_a_vector_is_long_enough_for_all_that_share_it(dtype: str, length: int, warps: int) -> None:
    shape = shape_of(kernel_of(SCALED, 1 << 14, length, dtype))

    assert shape.warps == warps


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("length", [304, 768, 2000])
def test_rows_stay_where_they_were_loaded_beside_a_vector(dtype: str, length: int) -> None:
    kernel = kernel_of(SCALED, 1 << 14, length, dtype)
    shape = shape_of(kernel)
    (cubin,) = compile_all([write_kernel(kernel, shape)], 90)

    assert cubin.shared <= shape.outer * shape.warps * 4  # a sum of each row and warp


@pytest.mark.parametrize(("rows", "each"), [(1, 8), (100, 8), (1 << 12, 32)])
def test_threads_hold_less_where_a_program_has_a_multiprocessor_to_itself(
    rows: int, each: int
) -> None:
    """More warps wait less for each other's loads, and there is less to compile."""
    shape = shape_of(long(rows, 1 << 13, shares=True))

    assert shape.outer * shape.inner // (32 * shape.warps) == each


def test_what_is_larger_than_a_cache_is_not_kept_there() -> None:
    large, small = (source_of(long(rows, 1 << 15)) for rows in (1 << 12, 1 << 9))

    assert "evict_first" in large
    assert "evict_first" not in small
    assert "evict_first" not in source_of(long(1 << 12, 1 << 15, shares=True)), "it is read twice"
