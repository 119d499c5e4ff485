"""Scans by vectors or rows abreast: any number of rows, any length, every combination."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import pytest

from stator.codegen.llvm.columns import Columns
from stator.codegen.llvm.entry import _shape_of
from stator.codegen.llvm.scans import ABREAST, CHUNK, Scans, is_scan
from stator.loops.parse import parse
from tests.codegen.llvm.execute import compiled

RUNNING: Final = """
kernel running
  buffer x: {dtype}[s0*s1]
  buffer out: {dtype}[s0*s1]
  outer i: s0
  scan j: s1
    acc {combine}= x[i*s1 + j]
    out[i*s1 + j] = acc
"""
COMBINES: Final = {
    "sum": ("f32", "f64", "bf16", "f16", "i64", "i32", "i8", "u8"),
    "prod": ("f32", "i64"),
    "max": ("f32", "bf16", "i32", "u8", "bool"),
    "min": ("f64", "i64", "bool"),
    "any": ("bool",),
    "all": ("bool",),
}
PAIRS: Final = [(c, dtype) for c, dtypes in COMBINES.items() for dtype in dtypes]


@pytest.mark.parametrize(("combine", "dtype"), PAIRS)
def test_every_combination_runs_along_rows(combine: str, dtype: str) -> None:
    kernel = compiled(RUNNING.format(combine=combine, dtype=dtype))
    assert _shape_of(kernel.kernel) is Scans

    for rows, length in ((1, 33), (ABREAST, 16), (9, 15), (6, 1), (3, 2 * CHUNK), (2, CHUNK + 5)):
        kernel.require({"s0": rows, "s1": length})


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_rows_that_fill_no_block_are_left_over(threads: int) -> None:
    kernel = compiled(RUNNING.format(combine="sum", dtype="f32"))

    for rows, length in itertools.product((0, 1, 3, 4, 5, 8, 11), (0, 1, 17)):
        kernel.require({"s0": rows, "s1": length}, threads=(threads,))


def test_nan_stays_from_where_it_comes() -> None:
    for combine in ("sum", "max", "min"):
        kernel = compiled(RUNNING.format(combine=combine, dtype="f32"))
        sizes = {"s0": 6, "s1": 9}
        arrays = kernel.arrays(sizes)
        arrays["x"][[4, 20, 53]] = np.nan
        arrays["x"][30] = np.inf

        kernel.require(sizes, arrays=arrays)


def test_a_long_running_sum_is_kept_in_f64() -> None:
    """In f32, 2**24 + 1 is 2**24."""
    kernel = compiled(RUNNING.format(combine="sum", dtype="f32"))
    for length in (40, CHUNK):
        sizes = {"s0": 5, "s1": length}
        arrays = kernel.arrays(sizes)
        arrays["x"][:] = 1.0
        arrays["x"][::length] = 2.0**24

        kernel.run(arrays, sizes, 1)

        last = arrays["out"][length - 1 :: length]
        assert (last == 2.0**24 + length).all()  # rounded once, at the end


SEVERAL: Final = """
kernel several
  buffer x: f32[238]
  buffer y: f32[238]
  buffer out: f32[238]
  buffer most: f32[238]
  outer h: 2, i: 7
  scan j: 17
    total sum= mul(x[119*h + 17*i + j], y[119*h + 17*i + j])
    largest max= x[119*h + 17*i + j]
    out[119*h + 17*i + j] = div(total, 2.0:f32)
    most[119*h + 17*i + j] = sub(largest, total)
"""


def test_several_totals_and_several_outer_axes() -> None:
    kernel = compiled(SEVERAL)

    assert _shape_of(kernel.kernel) is Scans
    kernel.require()


def test_a_scan_backwards() -> None:
    compiled("""
kernel backwards
  buffer x: f32[119]
  buffer out: f32[119]
  outer i: 7
  scan j: 17
    acc sum= x[17*i - j + 16]
    out[17*i - j + 16] = acc
""").require()


def test_a_scan_along_columns_runs_by_columns() -> None:
    kernel = compiled("""
kernel columns
  buffer x: f32[s0*s1]
  buffer out: f32[s0*s1]
  outer i: s1
  scan j: s0
    acc sum= x[j*s1 + i]
    out[j*s1 + i] = acc
""")

    assert _shape_of(kernel.kernel) is Columns
    for rows, columns in ((1, 1), (5, 3), (17, 33), (3, 600), (40, 513)):
        kernel.require({"s0": rows, "s1": columns}, threads=(1, 2))


@pytest.mark.parametrize("length", [17, CHUNK, 2 * CHUNK + 3])
def test_a_scan_among_other_stages(length: int) -> None:
    """What came before is known inside of it, and its total behind it."""
    size = 7 * length
    kernel = compiled(f"""
kernel mixed
  buffer x: f32[{size}]
  buffer out: f32[{size}]
  buffer shares: f32[{size}]
  scratch e: f32[{length}]
  outer i: 7
  stage j: {length}
    e[j] = exp(x[{length}*i + j])
    acc sum= e[j]
  scan k: {length}
    running sum= div(e[k], acc)
    out[{length}*i + k] = add(running, acc)
  stage l: {length}
    shares[{length}*i + l] = div(e[l], running)
""")

    assert _shape_of(kernel.kernel) is Scans
    kernel.require()


def test_a_total_that_waits_for_another_makes_no_vectors() -> None:
    compiled("""
kernel chained
  buffer x: f32[1000]
  buffer out: f32[1000]
  outer i: 4
  scan j: 250
    first sum= x[250*i + j]
    second sum= mul(first, x[250*i + j])
    out[250*i + j] = second
""").require()


def test_what_keeps_no_total_is_no_scan() -> None:
    yes = parse(RUNNING.format(combine="sum", dtype="f32"))
    unordered = parse(SEVERAL.replace("scan j", "stage j").replace("total,", "2.0:f32,"))
    scatter = parse("""
kernel scatter
  buffer n: i64[51]
  buffer out: f32[51]
  outer i: 3
  scan j: 17
    out[17*i + j] = f32(n[17*i + j])
""")

    assert is_scan(yes.stages[0])
    assert not any(is_scan(stage) for kernel in (unordered, scatter) for stage in kernel.stages)


def test_a_scan_without_rows() -> None:
    compiled("""
kernel alone
  buffer x: f32[17]
  buffer out: f32[17]
  scan j: 17
    acc sum= x[j]
    out[j] = acc
""").require()
