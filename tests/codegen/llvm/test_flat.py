"""Flat kernels: any stretch of any number of points, on any number of threads."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import pytest

from stator.codegen.llvm.entry import _shape_of
from stator.codegen.llvm.flat import Flat
from stator.core.dtypes import DType
from tests.codegen.llvm.execute import ODD, TYPES, compiled

COPY: Final = """
kernel copy
  buffer x: {dtype}[n]
  buffer out: {dtype}[n]
  outer i: n
  stage
    out[i] = x[i]
"""
TWO: Final = """
kernel two
  buffer x: f32[s0*s1]
  buffer row: f32[s1]
  buffer column: f32[s0]
  buffer out: f32[s0*s1]
  outer i: s0, j: s1
  stage
    out[i*s1 + j] = add(mul(x[i*s1 + j], row[j]), column[i])
"""


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_copies_of_odd_lengths(dtype: DType) -> None:
    kernel = compiled(COPY.format(dtype=repr(dtype)))
    assert _shape_of(kernel.kernel) is Flat

    for n in (0, *ODD, 100):
        kernel.require({"n": n})


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 13])
def test_stretches_may_begin_and_end_inside_of_rows(threads: int) -> None:
    kernel = compiled(TWO)

    for rows, columns in itertools.product((1, 2, 7), (1, 3, 17)):
        kernel.require({"s0": rows, "s1": columns}, threads=(threads,))


def test_odd_sizes_of_rows_and_columns() -> None:
    kernel = compiled(TWO)

    for rows, columns in itertools.product(ODD, repeat=2):
        kernel.require({"s0": rows, "s1": columns}, threads=(1, 3))


def test_empty_rows_and_columns_are_nothing_to_do() -> None:
    kernel = compiled(TWO)

    for size in ((0, 0), (0, 7), (7, 0)):
        kernel.require(dict(zip(("s0", "s1"), size, strict=True)))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 64, 100])
def test_known_lengths(length: int) -> None:
    compiled(
        COPY.format(dtype="f32").replace("n]", f"{length}]").replace("i: n", f"i: {length}")
    ).require()


def test_no_axes_are_one_point() -> None:
    compiled("""
kernel point
  buffer x: f32[1]
  buffer out: f32[1]
  stage
    out[0] = exp(x[0])
""").require()


def test_several_results_of_several_types() -> None:
    compiled("""
kernel several
  buffer x: f32[n]
  buffer h: bf16[n]
  buffer k: i64[n]
  buffer a: f32[n]
  buffer b: bf16[n]
  buffer c: bool[n]
  buffer d: i8[n]
  outer i: n
  stage
    a[i] = add(x[i], h[i])
    b[i] = mul(x[i], h[i])
    c[i] = lt(x[i], h[i])
    d[i] = i8(k[i])
""").require({"n": 37})


def test_a_later_statement_reads_what_an_earlier_one_stored() -> None:
    compiled("""
kernel update
  buffer x: f32[n]
  buffer twice: f32[n]
  outer i: n
  stage
    x[i] = add(x[i], 1.0:f32)
    twice[i] = mul(x[i], 2.0:f32)
""").require({"n": 37})


def test_a_rounded_result_is_read_back_rounded() -> None:
    compiled("""
kernel rounded
  buffer x: f32[n]
  buffer half: bf16[n]
  buffer exact: f32[n]
  outer i: n
  stage
    half[i] = exp(x[i])
    exact[i] = half[i]
""").require({"n": 37})


SHARED: Final = """
kernel shared
  buffer x: {dtype}[n]
  buffer y: {dtype}[n]
  buffer a: {dtype}[n]
  buffer b: {dtype}[n]
  shares a: x
  shares b: y
  outer i: n
  stage
    a[i] = add(x[i], y[i])
    b[i] = sub(y[i], x[i])
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_all_loads_come_before_stores_into_what_is_read(dtype: str) -> None:
    kernel = compiled(SHARED.format(dtype=dtype))

    for n in (1, 17, 33, 100):
        kernel.require({"n": n})


def test_a_gather_and_its_broadcast() -> None:
    kernel = compiled(
        """
kernel gather
  buffer table: f32[200]
  buffer rows: i64[n]
  buffer out: f32[20*n]
  outer i: n, j: 20
  stage
    out[20*i + j] = table[20*[rows[i]] + j]
""",
        rows=10,
    )

    for n in (1, 3, 17):
        kernel.require({"n": n})


def test_indices_with_quotients_of_negative_numbers() -> None:
    compiled("""
kernel folded
  buffer x: f32[40]
  buffer out: f32[111]
  outer i: 3, j: 37
  stage
    out[37*i + j] = x[((j - 20) // 3) + 7 + ((i - 1) % 3)]
""").require()


def test_numbers_that_may_be_negative_divide_downwards() -> None:
    kernel = compiled("""
kernel numbers
  number k
  buffer out: i64[n]
  buffer rest: i64[n]
  outer i: n
  stage
    out[i] = value((k // 3) + i)
    rest[i] = value((k % 3))
""")

    for k in (-7, -3, -1, 0, 2, 9):
        kernel.require({"n": 5, "k": k})


def test_memory_beside_the_arrays_is_not_touched() -> None:
    """The margins are looked at by every test; here vectors of every width end inside of them."""
    for dtype in ("f64", "f16", "i8"):
        kernel = compiled(COPY.format(dtype=dtype))
        for n in range(1, 70, 4):
            kernel.require({"n": n}, threads=(1, 2))


def test_nan_and_infinities_are_copied() -> None:
    kernel = compiled(COPY.format(dtype="f32"))
    arrays = kernel.arrays({"n": 33})
    arrays["x"][[0, 5, 32]] = np.nan, np.inf, -np.inf

    kernel.require({"n": 33}, arrays=arrays)
