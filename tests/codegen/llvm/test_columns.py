"""Reductions by columns: blocks of them, stretches of rows, every combination."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import pytest

from stator.codegen.llvm.columns import STRETCH, Columns
from stator.codegen.llvm.entry import _shape_of, emit_kernel
from stator.codegen.llvm.jit import _machine, _optimize, _parsed, module_text
from stator.codegen.llvm.shape import outer_count
from stator.codegen.llvm.sums import SHORT
from stator.loops.parse import parse
from stator.schedule.columns import MOST_COLUMNS as COLUMNS
from stator.schedule.columns import block_width
from tests.codegen.llvm.execute import ODD, THREADS, compiled

REDUCED: Final = """
kernel reduced
  buffer x: {dtype}[s0*s1]
  buffer out: {dtype}[s1]
  outer i: s1
  stage j: s0
    acc {combine}= x[j*s1 + i]
  stage
    out[i] = acc
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
def test_every_combination_runs_over_rows(combine: str, dtype: str) -> None:
    kernel = compiled(REDUCED.format(combine=combine, dtype=dtype))
    assert _shape_of(kernel.kernel) is Columns

    for rows, columns in ((1, 17), (STRETCH, 33), (STRETCH + 1, 15), (40, 1)):
        kernel.require({"s0": rows, "s1": columns})


def test_odd_numbers_of_rows_and_columns() -> None:
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))

    for rows, columns in itertools.product(ODD, repeat=2):
        kernel.require({"s0": rows, "s1": columns})


@pytest.mark.parametrize("columns", [COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 3])
def test_blocks_of_columns_end_where_the_row_does(columns: int) -> None:
    kernel = compiled(REDUCED.format(combine="max", dtype="i32"))

    kernel.require({"s0": 3, "s1": columns}, threads=(1, 2, 4))


def test_no_rows_give_the_neutral_value_and_no_columns_nothing() -> None:
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))

    kernel.require({"s0": 0, "s1": 20})
    kernel.require({"s0": 20, "s1": 0})


def test_nan_and_infinity_stay_in_their_column() -> None:
    for combine in ("sum", "max", "min"):
        kernel = compiled(REDUCED.format(combine=combine, dtype="f32"))
        sizes = {"s0": 20, "s1": 33}
        arrays = kernel.arrays(sizes)
        arrays["x"][[5, 70, 200]] = np.nan
        arrays["x"][[8, 300]] = np.inf, -np.inf

        kernel.require(sizes, arrays=arrays)


def test_a_long_sum_loses_no_more_than_one_stretch() -> None:
    """Behind 2**24, a sum in f32 alone would not grow by ones any more."""
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))
    sizes = {"s0": 300, "s1": 5}
    arrays = kernel.arrays(sizes)
    arrays["x"][:] = 1.0
    arrays["x"][:5] = 2.0**24

    kernel.run(arrays, sizes, 1)

    assert (np.abs(arrays["out"] - (2.0**24 + 299)) <= STRETCH).all()


KNOWN: Final = """
kernel known
  buffer x: f32[{area}]
  buffer out: f32[{columns}]
  outer i: {columns}
  stage j: {rows}
    acc sum= x[{columns}*j + i]
  stage
    out[i] = acc
"""


@pytest.mark.parametrize("rows", [1, 15, SHORT, SHORT + 1, SHORT + STRETCH + 3])
def test_short_sums_and_those_in_stretches(rows: int) -> None:
    kernel = compiled(KNOWN.format(rows=rows, columns=33, area=33 * rows))

    assert _shape_of(kernel.kernel) is Columns
    kernel.require(threads=(1, 2))


@pytest.mark.parametrize("columns", [64, 256, 288, 300, 700])
@pytest.mark.parametrize("rows", [3, SHORT, 10 * STRETCH + 5])
def test_blocks_that_are_whole_and_what_is_left_of_one(rows: int, columns: int) -> None:
    compiled(KNOWN.format(rows=rows, columns=columns, area=columns * rows)).require()


@pytest.mark.parametrize("combine", ["sum", "min", "max"])
def test_several_sums_of_whole_blocks(combine: str) -> None:
    compiled(f"""
kernel moments
  buffer x: f32[25600]
  buffer first: f32[64]
  buffer second: f64[64]
  outer i: 64
  stage j: 400
    plain {combine}= x[64*j + i]
    square sum= f64(mul(x[64*j + i], x[64*j + i]))
  stage
    first[i] = plain
    second[i] = square
""").require()


def test_parts_of_a_whole_block_stay_in_registers() -> None:
    """In the loop over rows a block of f32 has a register for 16 columns, none of them in memory.

    Of more columns than there are registers for, parts are in memory as before.
    """

    def optimized(columns: int) -> str:
        kernel = parse(KNOWN.format(rows=1000, columns=columns, area=1000 * columns))
        with _machine() as machine:
            parsed = _parsed(module_text([kernel]))
            _optimize(parsed, machine)
            return str(parsed)

    assert "phi <16 x float>" in optimized(256)
    assert "phi <16 x float>" not in optimized(8 * COLUMNS)


def test_rows_of_columns() -> None:
    kernel = compiled(
        """
kernel batched
  buffer x: f32[s0*595]
  buffer out: f32[35*s0]
  outer b: s0, i: 35
  stage j: 17
    acc sum= x[595*b + 35*j + i]
  stage
    out[35*b + i] = acc
""".replace("s0*595", "595*s0")
    )

    for batch in (1, 2, 5):
        kernel.require({"s0": batch}, threads=(1, 3))


@pytest.mark.parametrize("inner", [(5, 3), (3, 40), (40, 3), (2, 3, 4), (17, 17)], ids=str)
def test_several_reduced_axes(inner: tuple[int, ...]) -> None:
    names = [f"r{d}" for d in range(len(inner))]
    steps = [int(np.prod(inner[d + 1 :])) * 35 for d in range(len(inner))]
    place = " + ".join(f"{step}*{name}" for name, step in zip(names, steps, strict=True))
    axes = ", ".join(f"{name}: {n}" for name, n in zip(names, inner, strict=True))
    kernel = compiled(f"""
kernel several
  buffer x: f32[{35 * int(np.prod(inner))}]
  buffer out: f32[35]
  outer i: 35
  stage {axes}
    acc sum= x[{place} + i]
  stage
    out[i] = acc
""")

    assert _shape_of(kernel.kernel) is Columns
    kernel.require(threads=(1, 2))


SOFTMAX: Final = """
kernel softmax
  buffer x: {dtype}[s0*s1]
  buffer out: {dtype}[s0*s1]
  scratch e: f32[{length}]
  outer i: s1
  stage j: s0
    most max= x[j*s1 + i]
  stage j: s0
    e[j] = exp(sub(x[j*s1 + i], most))
    total sum= exp(sub(x[j*s1 + i], most))
  stage j: s0
    out[j*s1 + i] = div(e[j], total)
"""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_softmax_keeps_its_scratch_for_every_column(dtype: str) -> None:
    kernel = compiled(SOFTMAX.format(dtype=dtype, length="s0"))
    assert _shape_of(kernel.kernel) is Columns

    for rows, columns in ((1, 1), (17, 33), (5, 600), (33, 16)):
        kernel.require({"s0": rows, "s1": columns}, threads=(1, 2))


def test_scratch_of_unknown_length_lies_on_the_heap_and_is_given_back() -> None:
    text = module_text([parse(SOFTMAX.format(dtype="f32", length="s0"))])

    body = text[text.index("@softmax_rows") :]
    assert body.count("call ptr @malloc") == body.count("call void @free") == 1
    assert "%e = alloca" not in body


def test_scratch_of_known_length_lies_on_the_stack() -> None:
    text = module_text([parse(SOFTMAX.format(dtype="f32", length="17").replace("s0", "17"))])

    assert f"%e = alloca [{17 * COLUMNS} x float]" in text
    assert "call ptr @malloc" not in text


def test_threads_share_blocks_of_columns() -> None:
    kernel = parse(KNOWN.format(rows=4, columns=COLUMNS + 1, area=4 * (COLUMNS + 1)))

    width = block_width(kernel)
    assert width < COLUMNS  # else two threads would have one block and a single column
    assert outer_count(kernel).constant == -(-(COLUMNS + 1) // width)


def test_values_of_a_column_that_no_row_moves() -> None:
    """A weight for each column, read in the loop; and a result for each column from two totals."""
    compiled("""
kernel weighted
  buffer x: f32[561]
  buffer w: f32[33]
  buffer out: f32[33]
  buffer top: f32[33]
  outer i: 33
  stage j: 17
    total sum= mul(x[33*j + i], w[i])
    most max= x[33*j + i]
  stage
    out[i] = div(total, w[i])
    top[i] = add(most, total)
""").require(threads=THREADS)


def test_a_choice_inside_of_a_column() -> None:
    compiled("""
kernel chosen
  buffer x: f32[561]
  buffer out: f32[33]
  outer i: 33
  stage j: 20
    total sum= within(j - 2, 17, x[33*j + i - 66], 1.0:f32)
  stage
    out[i] = total
""").require()


def test_what_is_the_same_in_all_rows_is_computed_once_a_column() -> None:
    kernel = compiled("""
kernel normalized
  buffer x: f32[s0*s1]
  buffer w: f32[s1]
  buffer out: f32[s0*s1]
  outer i: s1
  stage r: s0
    acc sum= mul(x[i + r*s1], x[i + r*s1])
  stage r: s0
    out[i + r*s1] = mul(x[i + r*s1], f32(mul(f64(w[i]), sqrt(f64(add(acc, 1.0:f32))))))
""")

    for rows, columns in ((1, 1), (7, 3), (5, 33), (3, 600)):
        kernel.require({"s0": rows, "s1": columns}, threads=(1, 2))
    text = emit_kernel(kernel.kernel)
    before, _ = text.split("_thread(ptr", 1)
    assert before.count("@llvm.sqrt.f64(") == 1
    assert before.index("@llvm.sqrt.f64(") < before.rindex("inner_")


def test_a_function_of_the_c_library_is_the_same_in_all_rows_too() -> None:
    kernel = compiled("""
kernel powers
  buffer x: f64[s0*s1]
  buffer w: f64[s1]
  buffer out: f64[s0*s1]
  outer i: s1
  stage r: s0
    acc sum= x[i + r*s1]
  stage r: s0
    out[i + r*s1] = mul(pow(2.0:f64, w[i]), add(x[i + r*s1], acc))
""")

    assert _shape_of(kernel.kernel) is Columns
    for rows, columns in ((5, 3), (3, 40)):
        kernel.require({"s0": rows, "s1": columns})


def test_what_a_choice_leaves_out_is_not_read() -> None:
    compiled("""
kernel chosen
  buffer x: f32[160]
  buffer w: f32[4]
  buffer out: f32[160]
  outer i: 16
  stage r: 10
    acc sum= x[i + 16*r]
  stage r: 10
    out[i + 16*r] = add(acc, within(i, 4, exp(w[i]), x[i + 16*r]))
""").require()


def test_two_columns_ask_for_no_vectors_and_llvm_has_nothing_to_remark(
    capfd: pytest.CaptureFixture[str],
) -> None:
    compiled("""
kernel two
  buffer x: f64[1536]
  buffer out: f64[512]
  outer i: 256, column: 2
  stage r: 3
    acc sum= x[6*i + 2*r + column]
  stage
    out[2*i + column] = acc
""").require()

    assert capfd.readouterr().err == ""
