"""Rows: stages one after the other, sums in chunks, scratch on the stack or on the heap."""

from __future__ import annotations

import re
from typing import Final

import llvmlite.binding as llvm
import numpy as np
import pytest

from stator.codegen.llvm.entry import _shape_of, emit_kernel
from stator.codegen.llvm.jit import assembly, module_text
from stator.codegen.llvm.rows import CHUNK, STEP, Rows
from stator.codegen.llvm.sums import SHORT
from stator.loops.parse import parse
from tests.codegen.llvm.execute import ODD, compiled

HAS_VECTORS: Final = llvm.get_host_cpu_features().get("avx512f")
REDUCED: Final = """
kernel reduced
  buffer x: {dtype}[s0*s1]
  buffer out: {dtype}[s0]
  outer i: s0
  stage j: s1
    acc {combine}= x[i*s1 + j]
  stage
    out[i] = acc
"""
KNOWN: Final = """
kernel known
  buffer x: {dtype}[{area}]
  buffer out: {dtype}[3]
  outer i: 3
  stage j: {length}
    acc {combine}= x[{length}*i + j]
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
LENGTHS: Final = (1, 15, 63, SHORT - 1, SHORT, SHORT + 1, SHORT + STEP, CHUNK, CHUNK + STEP + 5)


@pytest.mark.parametrize(("combine", "dtype"), PAIRS)
def test_every_combination_of_unknown_length(combine: str, dtype: str) -> None:
    kernel = compiled(REDUCED.format(combine=combine, dtype=dtype))
    assert _shape_of(kernel.kernel) is Rows

    for rows, length in ((0, 5), (5, 0), *((3, n) for n in ODD), (7, 16), (2, 300)):
        kernel.require({"s0": rows, "s1": length}, threads=(1, 2))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("combine", "dtype"), [("sum", "f32"), ("max", "bf16"), ("sum", "i32")])
def test_known_lengths_around_chunks(combine: str, dtype: str, length: int) -> None:
    kernel = compiled(KNOWN.format(combine=combine, dtype=dtype, length=length, area=3 * length))

    kernel.require(threads=(1, 2))


def test_lengths_around_chunks_that_are_not_known() -> None:
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))

    for length in LENGTHS:
        kernel.require({"s0": 2, "s1": length}, threads=(1,))


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_threads_share_rows(threads: int) -> None:
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))

    for rows in (1, 2, 7, 8, 9):
        kernel.require({"s0": rows, "s1": 17}, threads=(threads,))


def test_nan_wins_and_infinities_cancel() -> None:
    for combine in ("sum", "max", "min", "prod"):
        kernel = compiled(REDUCED.format(combine=combine, dtype="f32"))
        sizes = {"s0": 5, "s1": 33}
        arrays = kernel.arrays(sizes)
        arrays["x"][7] = np.nan
        arrays["x"][[40, 50]] = np.inf, -np.inf
        arrays["x"][70] = np.inf

        kernel.require(sizes, arrays=arrays)


@pytest.mark.parametrize("length", [7, 33, 100, 255, 700])
def test_a_sum_of_unknown_length_is_rounded_once(length: int) -> None:
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))
    sizes = {"s0": 50, "s1": length}
    arrays = kernel.arrays(sizes)
    arrays["x"][:] = np.random.default_rng(length).standard_normal(50 * length)

    kernel.run(arrays, sizes, 1)

    exact = arrays["x"].astype(np.float64).reshape(50, length).sum(1)
    np.testing.assert_array_equal(arrays["out"], exact.astype(np.float32))


@pytest.mark.parametrize("length", [20, 100, 700])
def test_a_sum_of_unknown_length_is_rounded_once_beside_one_of_f64(length: int) -> None:
    kernel = compiled("""
kernel beside
  buffer x: f32[s0*s1]
  buffer out: f32[s0]
  buffer wide: f64[s0]
  outer i: s0
  stage j: s1
    a sum= x[i*s1 + j]
    b sum= f64(x[i*s1 + j])
  stage
    out[i] = a
    wide[i] = b
""")
    sizes = {"s0": 50, "s1": length}
    arrays = kernel.arrays(sizes)
    arrays["x"][:] = np.random.default_rng(length).standard_normal(50 * length)

    kernel.run(arrays, sizes, 1)

    np.testing.assert_array_equal(arrays["out"], arrays["wide"].astype(np.float32))


def test_a_long_sum_of_f32_is_kept_in_f64() -> None:
    """Chunks of ones behind 2**24, which f32 alone would not add."""
    kernel = compiled(REDUCED.format(combine="sum", dtype="f32"))
    sizes = {"s0": 1, "s1": 4 * CHUNK}
    arrays = kernel.arrays(sizes)
    arrays["x"][:] = 1.0
    arrays["x"][0] = 2.0**24

    kernel.run(arrays, sizes, 1)

    assert abs(float(arrays["out"][0]) - (2.0**24 + 4 * CHUNK - 1)) <= CHUNK


WHETHER: Final = """
kernel whether
  buffer x: {dtype}[{rows}]
  buffer some: bool[8]
  buffer every: bool[8]
  outer i: 8
  stage j: {length}
    a any= {value}
    b all= {value}
  stage
    some[i] = a
    every[i] = b
"""
TRUE_OF: Final = {
    "f32": "gt({x}, 0.0:f32)",
    "f64": "gt({x}, 0.0:f64)",
    "bf16": "gt({x}, 0.0:f32)",
    "i64": "ne({x}, 0:i64)",
    "i16": "ne({x}, 0:i16)",
    "u8": "ne({x}, 0:u8)",
    "bool": "{x}",
}


def whether(length: int | str, dtype: str) -> str:
    place = "i*s0 + j" if isinstance(length, str) else f"{length}*i + j"
    rows = "8*s0" if isinstance(length, str) else 8 * length
    value = TRUE_OF[dtype].format(x=f"x[{place}]")
    return WHETHER.format(dtype=dtype, length=length, rows=rows, value=value)


@pytest.mark.parametrize("length", [17, 300, 2100, "s0"])
@pytest.mark.parametrize("dtype", TRUE_OF)
def test_one_element_of_a_row_makes_any_true_or_all_false(dtype: str, length: int | str) -> None:
    kernel = compiled(whether(length, dtype))
    known = 333 if isinstance(length, str) else length
    sizes = {"s0": known} if isinstance(length, str) else {}
    for odd in (0, 1):
        arrays = kernel.arrays(sizes)
        rows = arrays["x"].reshape(8, known)
        rows[:] = 1 - odd
        for row in range(7):  # the last one is all of a kind
            rows[row, row * (known - 1) // 6] = odd

        kernel.require(sizes, threads=(1,), arrays=arrays)


@pytest.mark.skipif(not HAS_VECTORS, reason="the processor has no vectors of 512 bits")
@pytest.mark.parametrize("combine", ["any", "all"])
def test_a_sum_keeps_its_vectors_beside_any_and_all(combine: str) -> None:
    code = assembly(
        [
            parse(f"""
kernel beside
  buffer x: f32[32768]
  buffer total: f64[8]
  buffer found: bool[8]
  outer i: 8
  stage j: 4096
    a sum= f64(x[4096*i + j])
    b {combine}= is_nan(x[4096*i + j])
  stage
    total[i] = a
    found[i] = b
""")
        ]
    )

    assert "zmm" in code
    # The last steps of adding the lanes up, in two copies of the loops.
    assert len(re.findall(r"\bv?addsd\b", code)) <= 8


SOFTMAX: Final = """
kernel softmax
  buffer x: {dtype}[{rows}]
  buffer out: {dtype}[{rows}]
  scratch e: f32[{length}]
  outer i: 5
  stage j: {length}
    most max= x[{place}]
  stage j: {length}
    e[j] = exp(sub(x[{place}], most))
    total sum= exp(sub(x[{place}], most))
  stage j: {length}
    out[{place}] = div(e[j], total)
"""


def softmax(length: int | str, dtype: str = "f32") -> str:
    if isinstance(length, str):
        return SOFTMAX.format(
            dtype=dtype, rows=f"5*{length}", length=length, place=f"i*{length} + j"
        )
    return SOFTMAX.format(dtype=dtype, rows=5 * length, length=length, place=f"{length}*i + j")


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("length", [1, 17, 33, 300])
def test_softmax_of_known_length(length: int, dtype: str) -> None:
    text = softmax(length, dtype)
    if dtype == "f64":
        text = text.replace("scratch e: f32", "scratch e: f64")

    compiled(text).require(threads=(1, 2))


def test_softmax_of_unknown_length() -> None:
    kernel = compiled(softmax("s0"))

    for length in (*ODD, 2, 100, 1000):
        kernel.require({"s0": length}, threads=(1, 2))


def test_a_row_of_unknown_length_keeps_its_scratch_on_the_heap() -> None:
    text = module_text([parse(softmax("s0"))])

    body = text[text.index("@softmax_rows") :]
    assert body.count("call ptr @malloc") == body.count("call void @free") == 1
    assert "%e = alloca" not in body


def test_a_row_of_known_length_keeps_its_scratch_on_the_stack() -> None:
    text = module_text([parse(softmax(33))])

    assert "%e = alloca [33 x float]" in text
    assert "call ptr @malloc" not in text


def test_an_empty_row_of_unknown_length_is_nothing_to_do() -> None:
    compiled(softmax("s0")).require({"s0": 0})


def test_several_totals_of_different_kinds_in_one_loop() -> None:
    compiled("""
kernel several
  buffer x: f32[1650]
  buffer n: i32[1650]
  buffer total: f32[5]
  buffer most: f32[5]
  buffer whole: i64[5]
  buffer some: bool[5]
  outer i: 5
  stage j: 330
    a sum= x[330*i + j]
    b max= x[330*i + j]
    c sum= i64(n[330*i + j])
    d any= lt(x[330*i + j], -3.0:f32)
  stage
    total[i] = a
    most[i] = b
    whole[i] = c
    some[i] = d
""").require()


def test_stores_beside_a_total() -> None:
    compiled("""
kernel beside
  buffer x: f32[1650]
  buffer out: f32[1650]
  buffer total: f32[5]
  outer i: 5
  stage j: 330
    out[330*i + j] = mul(x[330*i + j], 2.0:f32)
    a sum= x[330*i + j]
  stage
    total[i] = a
""").require()


@pytest.mark.parametrize("inner", [(3, 5), (17, 33), (2, 3, 4), (300, 2), (2, 300)], ids=str)
def test_several_inner_axes(inner: tuple[int, ...]) -> None:
    total = int(np.prod(inner))
    steps = [int(np.prod(inner[d + 1 :])) for d in range(len(inner))]
    # Reversed strides, so that the axes do not run as one.
    place = " + ".join(
        f"{total // (n * step)}*r{d}" for d, (n, step) in enumerate(zip(inner, steps, strict=True))
    )
    axes = ", ".join(f"r{d}: {n}" for d, n in enumerate(inner))
    kernel = compiled(f"""
kernel several
  buffer x: f32[{4 * total}]
  buffer out: f32[4]
  outer i: 4
  stage {axes}
    acc sum= x[{total}*i + {place}]
  stage
    out[i] = acc
""")

    kernel.require(threads=(1, 2))


def test_rows_without_outer_axes() -> None:
    compiled("""
kernel alone
  buffer x: f32[330]
  buffer out: f32[1]
  stage j: 330
    a sum= x[j]
  stage
    out[0] = a
""").require()


SCATTER: Final = """
kernel scatter
  buffer places: i64[{count}]
  buffer x: {dtype}[{count}]
  buffer out: {dtype}[20]
  scan j: {count}
    out[[places[j]]] {how}= x[j]
"""


@pytest.mark.parametrize("how", ["", "sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", ["f32", "i64", "u8", "bf16"])
def test_scattered_updates_come_one_after_the_other(how: str, dtype: str) -> None:
    for count in (1, 17, 200):
        text = SCATTER.format(count=count, dtype=dtype, how=how).replace("  =", " =")
        if dtype == "bf16":
            text = text.replace(": bf16[20]", ": f32[20]")  # rounded at every update else
        compiled(text, places=20).require(threads=(1, 3))


def test_scattered_rows_in_blocks() -> None:
    compiled(
        """
kernel blocks
  buffer places: i64[9]
  buffer x: f32[288]
  buffer out: f32[160]
  outer block: 2
  scan j: 9, column: 16
    out[32*[places[j]] + 16*block + column] sum= x[32*j + 16*block + column]
""",
        places=5,
    ).require()


def test_long_rows_fetch_the_next_one_while_they_compute() -> None:
    """The first stage waits for memory anyway; behind the last row nothing is touched."""
    kernel = compiled("""
kernel long
  buffer x: f32[15000]
  buffer out: f32[3]
  outer i: 3
  stage r: 5000
    top max= x[5000*i + r]
  stage r: 5000
    acc sum= exp(sub(x[5000*i + r], top))
  stage
    out[i] = add(top, log(acc))
""")

    text = emit_kernel(kernel.kernel)
    assert text.count("@llvm.prefetch") == 1
    kernel.require(threads=(1, 2))


def test_rows_that_are_looked_up_are_not_fetched() -> None:
    """The number of the row behind the last would be read from beyond its tensor."""
    kernel = parse("""
kernel looked_up
  buffer n: i64[3]
  buffer x: f32[50000]
  buffer out: f32[3]
  outer i: 3
  stage r: 5000
    top max= x[5000*[n[i]] + r]
  stage r: 5000
    acc sum= exp(sub(x[5000*[n[i]] + r], top))
  stage
    out[i] = add(top, log(acc))
""")

    assert "@llvm.prefetch" not in emit_kernel(kernel)
