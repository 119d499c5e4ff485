"""Transposed reads through tiles: every size, every type, on any number of threads."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from stator.codegen.llvm.entry import _shape_of
from stator.codegen.llvm.flat import Flat
from stator.codegen.llvm.shape import SIDE, outer_count, transposed
from stator.codegen.llvm.tiles import Tiles
from stator.core.dtypes import DType
from stator.loops.parse import parse
from tests.codegen.llvm.execute import ODD, TYPES, compiled

TURNED: Final = """
kernel turned
  buffer x: {dtype}[s0*s1]
  buffer out: {dtype}[s0*s1]
  outer i: s0, j: s1
  stage
    out[i*s1 + j] = x[j*s0 + i]
"""


@pytest.mark.parametrize("dtype", TYPES, ids=repr)
def test_a_transposed_copy_is_right_at_odd_sizes(dtype: DType) -> None:
    kernel = compiled(TURNED.format(dtype=repr(dtype)))
    assert _shape_of(kernel.kernel) is Tiles

    for rows, columns in itertools.product(ODD, repeat=2):
        kernel.require({"s0": rows, "s1": columns})


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7, 16])
def test_threads_share_stripes(threads: int) -> None:
    kernel = compiled(TURNED.format(dtype="f32"))

    for size in ((16, 16), (33, 40), (100, 17), (5, 3)):
        kernel.require(dict(zip(("s0", "s1"), size, strict=True)), threads=(threads,))


def test_no_rows_or_columns_are_nothing_to_do() -> None:
    kernel = compiled(TURNED.format(dtype="f32"))

    for size in ((0, 5), (5, 0), (0, 0), (0, 33), (33, 0)):
        kernel.require(dict(zip(("s0", "s1"), size, strict=True)))


KNOWN: Final = """
kernel known
  buffer x: f32[{area}]
  buffer y: f32[{area}]
  buffer row: f32[{columns}]
  buffer out: f32[{area}]
  outer i: {rows}, j: {columns}
  stage
    out[{columns}*i + j] = add(mul(x[{rows}*j + i], y[{columns}*i + j]), row[j])
"""


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 33), (33, 16), (17, 48), (31, 17)])
def test_known_sizes_with_other_loads_beside(rows: int, columns: int) -> None:
    kernel = compiled(KNOWN.format(rows=rows, columns=columns, area=rows * columns))

    assert _shape_of(kernel.kernel) is Tiles
    kernel.require()


BATCHED: Final = """
kernel batched
  buffer x: f32[{a}*n]
  buffer out: f32[{a}*n]
  outer b: n, i: 17, h: 3, j: 19
  stage
    out[969*b + 57*i + 19*h + j] = neg(x[969*b + 51*j + i + 17*h])
"""


def test_axes_around_the_tiles_are_rows() -> None:
    kernel = compiled(BATCHED.format(a=17 * 3 * 19))

    side, loads = transposed(kernel.kernel) or (None, ())
    assert side is kernel.kernel.outer[1]
    assert len(loads) == 1
    for n in (1, 2, 3):
        kernel.require({"n": n}, threads=(1, 3))


def test_two_transposed_loads_of_different_types_have_a_tile_each() -> None:
    kernel = compiled("""
kernel two
  buffer x: bf16[561]
  buffer y: f64[561]
  buffer out: f32[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = add(x[17*j + i], f32(y[17*j + i]))
""")

    shape = transposed(kernel.kernel)
    assert shape is not None
    assert len(shape[1]) == 2
    kernel.require()


def test_one_transposed_load_read_twice_has_one_tile() -> None:
    kernel = compiled("""
kernel twice
  buffer x: f32[561]
  buffer out: f32[561]
  buffer other: f32[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = mul(x[17*j + i], x[17*j + i])
    other[33*i + j] = exp(x[17*j + i])
""")

    shape = transposed(kernel.kernel)
    assert shape is not None
    assert len(shape[1]) == 1
    kernel.require()


def test_a_place_with_an_offset_and_padded_rows() -> None:
    kernel = compiled("""
kernel padded
  buffer x: f32[900]
  buffer out: f32[900]
  outer i: 17, j: 20
  stage
    out[25*i + j + 3] = x[29*j + i + 5]
""")

    assert _shape_of(kernel.kernel) is Tiles
    kernel.require()


def test_results_of_other_types_than_what_is_turned() -> None:
    for read, written, value in (
        ("bf16", "f32", "x[17*j + i]"),
        ("f32", "bf16", "x[17*j + i]"),
        ("i8", "i64", "i64(x[17*j + i])"),
        ("bool", "f32", "f32(x[17*j + i])"),
        ("f32", "bool", "lt(x[17*j + i], 0.0:f32)"),
    ):
        kernel = compiled(f"""
kernel cast
  buffer x: {read}[561]
  buffer out: {written}[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = {value}
""")
        kernel.require(threads=(1, 2))


def test_an_input_that_is_stored_into_is_read_before() -> None:
    """The stored input lies across, beside another that lies along."""
    kernel = compiled("""
kernel shared
  buffer x: f32[561]
  buffer y: f32[561]
  buffer new: f32[561]
  shares new: x
  outer i: 17, j: 33
  stage
    new[33*i + j] = add(x[33*i + j], y[17*j + i])
""")

    assert _shape_of(kernel.kernel) is Tiles
    kernel.require()


# Which kernels


NOT_TILED: Final = {
    "short rows": KNOWN.format(rows=15, columns=33, area=15 * 33),
    "short columns": KNOWN.format(rows=33, columns=15, area=15 * 33),
    "nothing lies across": """
kernel plain
  buffer x: f32[561]
  buffer out: f32[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = x[33*i + j]
""",
    "guarded": """
kernel guarded
  buffer x: f32[561]
  buffer out: f32[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = within(j - 5, 20, x[17*j + i - 85], 0.0:f32)
""",
    "one axis": """
kernel one
  buffer x: f32[561]
  buffer out: f32[33]
  outer j: 33
  stage
    out[j] = x[17*j]
""",
    "every second": """
kernel second
  buffer x: f32[1122]
  buffer out: f32[561]
  outer i: 17, j: 33
  stage
    out[33*i + j] = x[34*j + 2*i]
""",
}


@pytest.mark.parametrize("name", NOT_TILED)
def test_others_stay_flat_and_are_right(name: str) -> None:
    kernel = compiled(NOT_TILED[name])

    assert transposed(kernel.kernel) is None
    assert _shape_of(kernel.kernel) is Flat
    kernel.require()


def test_threads_share_one_stripe_for_each_row_of_tiles() -> None:
    kernel = parse(KNOWN.format(rows=33, columns=48, area=33 * 48))

    assert outer_count(kernel).constant == -(-33 // SIDE)
