"""Choices that are steady along the innermost loop give loops of their own for each outcome."""

from __future__ import annotations

from typing import Final

import pytest

from stator.codegen.llvm.emitter import (
    MOST_NODES,
    MOST_OUTCOMES,
    _is_little,
    _steady_choices,
    is_within_32_bits,
    neutral,
)
from stator.codegen.llvm.jit import module_text
from stator.codegen.llvm.writer import numbered
from stator.core.dtypes import DType
from stator.loops.build import Body, const
from stator.loops.index import Index
from stator.loops.ir import Buffer, Combine, Expr, Kernel, Load
from stator.loops.parse import parse
from tests.codegen.llvm.execute import compiled

HEADER: Final = """
kernel chosen
  buffer x: f32[400]
  buffer y: f32[400]
  buffer where: i64[20]
  buffer out: f32[340]
  outer i: 20
  stage j: 17
"""
# A value at row i and column j, and how many of its choices are steady along j.
VALUES: Final = {
    "by the row": ("within(i - 3, 9, x[17*i + j - 51], y[j])", 1),
    "by the column": ("within(j - 3, 9, x[17*i + j], y[j])", 0),
    "by both": ("within(17*i + j - 5, 200, x[17*i + j - 5], y[j])", 0),
    "two": (
        "add(within(i - 3, 9, x[17*i + j - 51], y[j]), within(i, 5, y[17*i + j], x[j]))",
        2,
    ),
    "one inside of the other": (
        "within(i - 3, 9, within(i - 5, 2, x[17*i + j - 85], y[j]), x[j])",
        2,
    ),
    "one in each side": (
        "within(i, 10, within(i - 5, 2, x[j], y[j]), within(i - 15, 2, y[j + 17], x[j + 17]))",
        3,
    ),
    "three": (
        "add(within(i, 5, x[j], y[j]), add(within(i - 2, 9, x[j + 1], y[j]),"
        " within(i - 7, 9, x[j + 2], y[j])))",
        3,
    ),
    "six, each inside of the one before": (
        "within(i, 2, x[j], within(i - 2, 3, y[j], within(i - 5, 1, x[j + 1], within(i - 6, 4,"
        " y[j + 1], within(i - 10, 2, neg(x[j]), within(i - 12, 3, y[j + 2], x[j + 2]))))))",
        6,
    ),
    "steady and not": ("within(i - 3, 9, within(j, 5, x[17*i + j - 51], y[j]), y[j])", 1),
    "steady inside of not": ("within(j, 5, within(i - 3, 9, x[17*i + j - 51], y[0]), y[j])", 1),
    "the same twice": (
        "add(within(i - 3, 9, x[17*i + j - 51], y[j]), within(i - 3, 9, y[j], x[j]))",
        1,
    ),
    "by a place that is looked up": ("within([where[i]] - 3, 9, x[j], y[j])", 0),
    "in an index": ("x[[within(i - 3, 9, where[i], 0:i64)] + j]", 1),
}


def rows(value: str) -> str:
    return HEADER + f"    out[17*i + j] = {value}\n"


def flat(value: str) -> str:
    return rows(value).replace("outer i: 20\n  stage j: 17", "outer i: 20, j: 17\n  stage")


def steady(kernel: Kernel) -> int:
    axis = (kernel.stages[0].inner or kernel.outer)[-1]
    return len(_steady_choices(kernel.statements, axis, {}))


@pytest.mark.parametrize("name", VALUES)
def test_steady_choices_are_found(name: str) -> None:
    value, count = VALUES[name]

    assert steady(parse(rows(value))) == count
    assert steady(parse(flat(value))) == count


@pytest.mark.parametrize("name", VALUES)
def test_rows_choose_as_the_interpreter_does(name: str) -> None:
    compiled(rows(VALUES[name][0]), where=20).require(threads=(1, 3))


@pytest.mark.parametrize("name", VALUES)
def test_flat_kernels_choose_as_the_interpreter_does(name: str) -> None:
    compiled(flat(VALUES[name][0]), where=20).require(threads=(1, 3, 7))


@pytest.mark.parametrize("name", VALUES)
def test_sums_choose_as_the_interpreter_does(name: str) -> None:
    text = HEADER + f"    acc sum= {VALUES[name][0]}\n  stage\n    out[i] = acc\n"

    compiled(text, where=20).require(threads=(1, 3))


def test_a_settled_choice_is_not_asked_again() -> None:
    """Only the condition in front of the loops is left; the loops themselves have no branches."""
    text = module_text([parse(rows(VALUES["by the row"][0]))])

    body = text[text.index("@chosen_rows") : text.index("@chosen_thread")]
    assert body.count("icmp ult") == 1
    assert "chosen_" not in body.replace("@chosen_", "")


def test_few_outcomes_have_a_loop_each_and_of_many_only_one_has() -> None:
    def loops(value: str) -> int:
        text = module_text([parse(rows(value))])
        body = text[text.index("@chosen_rows") : text.index("@chosen_thread")]
        return sum(line.startswith("inner_") and "done" not in line for line in body.splitlines())

    assert MOST_OUTCOMES == 2
    assert loops(VALUES["by the row"][0]) == 2
    assert loops(VALUES["two"][0]) == 4
    assert loops(VALUES["three"][0]) == 2
    assert loops(VALUES["six, each inside of the one before"][0]) == 7


def test_much_code_is_not_written_for_every_outcome() -> None:
    """A tensor each for every row, and a long chain that all of them go through."""
    value = VALUES["six, each inside of the one before"][0]
    for _ in range(MOST_NODES // 7):
        value = f"neg({value})"
    kernel = parse(rows(value))

    assert not _is_little(kernel.statements, kernel.stages[0].inner[-1], {})


def test_sizes_that_are_not_known_choose_as_well() -> None:
    kernel = compiled("""
kernel joined
  buffer x: f32[s0*s2]
  buffer y: f32[s1*s2]
  buffer out: f32[s0*s2 + s1*s2]
  outer i: s0 + s1, j: s2
  stage
    out[i*s2 + j] = within(i, s0, x[i*s2 + j], y[i*s2 + j - s0*s2])
""")

    for sizes in ((1, 1, 1), (3, 5, 7), (5, 0, 17), (0, 5, 17), (16, 17, 33)):
        kernel.require(dict(zip(("s0", "s1", "s2"), sizes, strict=True)), threads=(1, 3))


def test_statements_of_one_loop_share_their_choices() -> None:
    compiled("""
kernel shared
  buffer x: f32[340]
  buffer a: f32[340]
  buffer b: f32[340]
  outer i: 20
  stage j: 17
    a[17*i + j] = within(i - 3, 9, x[17*i + j - 51], 1.0:f32)
    b[17*i + j] = within(i - 3, 9, a[17*i + j], x[17*i + j])
""").require()


# Neutral values


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "i16", "i8", "u8", "bool"])
@pytest.mark.parametrize("combine", ["sum", "prod", "max", "min"])
def test_an_empty_reduction_is_the_neutral_value(combine: str, dtype: str) -> None:
    if dtype == "bool" and combine in ("sum", "prod"):
        combine = {"sum": "any", "prod": "all"}[combine]
    kernel = compiled(f"""
kernel empty
  buffer x: {dtype}[n]
  buffer out: {dtype}[3]
  outer i: 3
  stage j: n
    acc {combine}= x[j]
  stage
    out[i] = acc
""")

    kernel.require({"n": 0})


def test_neutral_values_are_written_in_the_type_s_own_bits() -> None:
    assert neutral(Combine.MIN, DType.U8) == "-1"
    assert neutral(Combine.MAX, DType.I8) == "-128"


def test_vectors_of_several_registers_have_fewer_copies() -> None:
    text = "br i1 %v, label %a, label %b, !llvm.loop !{lanes:16x4}"
    for registers, copies in ((1, 4), (2, 2), (4, 1), (8, 1)):
        assert f'!"llvm.loop.interleave.count", i32 {copies}' in numbered(text, registers)


b = Body()
X: Final = Load(DType.F32, Buffer("x", DType.F32, Index.of(8)), Index.of(0))


@pytest.mark.parametrize(
    ("expr", "is_small"),
    [
        (X, False),
        (b.min(b.max(X, 0.0), 255.0), True),
        (b.max(b.min(X, 255.0), -128.0), True),
        (b.min(b.max(b.min(X, 1e30), 0.0), 9.0), True),
        (b.min(X, 255.0), False),
        (b.max(X, 0.0), False),
        (b.min(b.max(X, 0.0), 2.0**31), False),
        (b.min(b.max(X, -(2.0**32)), 0.0), False),
        (b.min(b.max(X, X), 255.0), False),
        (b.add(b.min(b.max(X, 0.0), 255.0), 1e10), False),
        (b.min(b.max(X, const(float("nan"), DType.F32)), 255.0), False),
    ],
    ids=str,
)
def test_limits_say_how_wide_a_number_is(expr: Expr, is_small: bool) -> None:
    assert is_within_32_bits(expr) is is_small


@pytest.mark.parametrize("target", [DType.U8, DType.I8, DType.I16], ids=repr)
def test_numbers_within_limits_become_integers_as_others_do(target: DType) -> None:
    kernel = compiled(f"""
kernel limited
  buffer x: f32[n]
  buffer out: {target!r}[n]
  buffer other: {target!r}[n]
  outer i: n
  stage
    out[i] = {target!r}(min(max(mul(x[i], 100.0:f32), -1000.0:f32), 1000.0:f32))
    other[i] = {target!r}(min(mul(x[i], 100.0:f32), 1000.0:f32))
""")
    for n in (1, 17, 100):
        kernel.require({"n": n})
