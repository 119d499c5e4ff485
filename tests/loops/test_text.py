"""Kernels as text: exact round trip, readable errors."""

import math
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings

from stator.core.dtypes import DType
from stator.errors import CompileError
from stator.loops.build import apply
from stator.loops.index import Axis, Element, Index, Quotient, Remainder, Symbol
from stator.loops.ir import (
    Accumulate,
    Buffer,
    Combine,
    Const,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Store,
)
from stator.loops.parse import parse
from stator.loops.prims import Prim
from stator.loops.text import statement_text, to_text
from tests.fuzz.kernels import kernels

SOFTMAX: Final = """\
kernel softmax
  buffer x: f32[4096*s0]
  buffer out: f32[4096*s0]
  scratch e: f32[4096]
  outer i0: s0
  stage i1: 4096
    acc0 max= x[4096*i0 + i1]
  stage i1: 4096
    e[i1] = exp(sub(x[4096*i0 + i1], acc0))
    acc1 sum= e[i1]
  stage i1: 4096
    out[4096*i0 + i1] = div(e[i1], acc1)
"""
I0 = Axis("i0", Index.of(8))
OUT = Buffer("out", DType.F32, Index.of(8))


def storing(value: Expr, dtype: DType = DType.F32) -> Kernel:
    out = Buffer("out", dtype, Index.of(8))
    return Kernel("k", (I0,), (Stage((), (Store(out, Index.of(I0), value),)),))


def body(kernel: Kernel) -> list[str]:
    """Lines of the statements."""
    return [line.strip() for line in to_text(kernel).splitlines() if line.startswith("    ")]


def test_softmax_reads_as_in_the_design() -> None:
    kernel = parse(SOFTMAX)

    assert to_text(kernel) == SOFTMAX
    x = Buffer("x", DType.F32, 4096 * Index.of(Symbol("s0")))
    i0, i1 = Axis("i0", Index.of(Symbol("s0"))), Axis("i1", Index.of(4096))
    load = Load(DType.F32, x, 4096 * Index.of(i0) + i1)
    assert kernel.outer == (i0,)
    assert kernel.stages[0] is Stage((i1,), (Accumulate("acc0", Combine.MAX, load),))
    assert [buffer.name for buffer in kernel.scratch] == ["e"]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernels())
def test_parsing_gives_the_kernel_back(kernel: Kernel) -> None:
    assert parse(to_text(kernel)) is kernel


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (math.nan, DType.F32, "nan:f32"),
        (math.inf, DType.F64, "inf:f64"),
        (-math.inf, DType.F32, "-inf:f32"),
        (-0.0, DType.F32, "-0.0:f32"),
        (0.0, DType.F32, "0.0:f32"),
        (1e-45, DType.F64, "1e-45:f64"),
        (-1.5e300, DType.F64, "-1.5e+300:f64"),
        (0.1, DType.F32, "0.1:f32"),
        (2, DType.I64, "2:i64"),
        (-(2**63), DType.I64, "-9223372036854775808:i64"),
        (2, DType.U8, "2:u8"),
        (True, DType.BOOL, "True:bool"),
        (False, DType.BOOL, "False:bool"),
    ],
)
def test_constants_keep_value_and_type(value: float, dtype: DType, text: str) -> None:
    kernel = storing(Const(dtype, value), dtype)

    assert body(kernel) == [f"out[i0] = {text}"]
    assert parse(to_text(kernel)) is kernel


def test_halves_are_widened_without_a_word() -> None:
    x = Buffer("x", DType.BF16, Index.of(8))
    kernel = storing(Load(DType.F32, x, Index.of(I0)), DType.F16)

    assert body(kernel) == ["out[i0] = x[i0]"]
    assert parse(to_text(kernel)) is kernel


def test_types_that_do_not_follow_are_said() -> None:
    kernel = storing(IndexValue(DType.I32, Index.of(I0)), DType.I32)

    assert body(kernel) == ["out[i0] = value(i0):i32"]
    assert parse(to_text(kernel)) is kernel


def test_every_kind_of_index() -> None:
    rows = Load(DType.I64, Buffer("rows", DType.I64, Index.of(8)), Index.of(I0))
    s1 = Index.of(Symbol("s1"))
    index = (
        3 * Index.of(Element(rows)) * s1
        - 2 * Index.of(Quotient(Index.of(I0) + 1, 3 * s1))
        + Index.of(Remainder(Index.of(Quotient(Index.of(I0), Index.of(4))), s1))
        + Index.of(Quotient(Index.of(-1), Index.of(4)))
        - 7
    )
    kernel = storing(IndexValue(DType.I64, index), DType.I64)

    assert parse(to_text(kernel)) is kernel
    assert "  size s1\n" in to_text(kernel)
    for part in ("3*[rows[i0]]*s1", "2*((i0 + 1) // (3*s1))", "((i0 // 4) % s1)", "((-1) // 4)"):
        assert part in body(kernel)[0]


def test_a_number_that_may_be_negative_is_declared_as_one() -> None:
    number, size = Symbol("k", is_signed=True), Symbol("s0")
    buffer = Buffer("x", DType.F32, Index.of(number) + Index.of(size))
    value = Load(DType.F32, buffer, Index.of(I0) + number)

    text = to_text(storing(value))

    assert "  number k\n" in text
    assert "size" not in text
    assert parse(text) is storing(value)


def test_what_a_statement_shares_stands_once() -> None:
    x = Load(DType.F32, Buffer("x", DType.F32, Index.of(8)), Index.of(I0))
    value: Expr = apply(Prim.EXP, x)
    for _ in range(60):  # as a tree, 2**60 nodes
        value = apply(Prim.MUL, value, value)
    kernel = storing(value)

    lines = body(kernel)
    assert lines[:2] == ["let t0 = exp(x[i0])", "let t1 = mul(t0, t0)"]
    assert lines[-1] == "out[i0] = mul(t59, t59)"
    assert parse(to_text(kernel)) is kernel
    assert statement_text(kernel, kernel.statements[0]) == lines[-1]


def test_deep_expressions_are_cut() -> None:
    value: Expr = Load(DType.F32, Buffer("x", DType.F32, Index.of(8)), Index.of(I0))
    for _ in range(3000):  # deeper than Python recurs
        value = apply(Prim.NEG, value)

    assert parse(to_text(storing(value))) is storing(value)


def test_names_of_keywords_are_names() -> None:
    text = """\
kernel kernel
  buffer outer: f32[8]
  buffer stage: f32[8]
  outer size: 8
  stage sum: 1
    stage[size + sum] = outer[size + sum]
    buffer sum= outer[size + sum]
    let max= outer[size + sum]
"""
    assert to_text(parse(text)) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernel softmax", "softmax", "line 1: expected 'kernel', found 'softmax'"),
        ("e[i1] = exp(", "e[i1] = expo(", "line 9: expected a primitive or a type, found 'expo'"),
        ("e[i1] = exp(", "f[i1] = exp(", "line 9: expected a buffer, found 'f'"),
        ("e[i1] = exp", "e[i7] = exp", "line 9: expected an axis in scope or a size, found 'i7'"),
        ("acc1 sum= e", "acc1 add= e", "line 10: expected '[' or one of sum, prod,"),
        ("acc0))", "acc7))", "line 9: expected an accumulator of an earlier line"),
        ("acc0))", "acc0)", "line 9: expected ',' or ')', found the end of the line"),
        ("acc0))", "acc0)))", "line 9: expected the end of the line, found ')'"),
        ("acc0))", "2.5))", "line 9: expected ':' and a type, found ')'"),
        ("acc0))", "2.5:f31))", "line 9: expected a type, found 'f31'"),
        ("x: f32[", "x: f33[", "line 2: expected a type, found 'f33'"),
        ("  outer i0: s0", "  over i0: s0", "line 5: expected 'buffer', 'scratch', 'size',"),
        ("stage i1: 4096\n    acc0", "stage i1 4096\n    acc0", "line 6: expected ':'"),
        ("acc0 max= x[", "acc0 max= x(", "line 7: expected a primitive or a type, found 'x'"),
        ("x[4096*i0", "x[4096 i0", "line 7: expected ']', found 'i0'"),
        ("x[4096*i0", "x[(i0 + 4)*i1", "line 7: expected '//' or '%', found"),
    ],
)
def test_errors_say_the_line_and_what_was_expected(old: str, new: str, message: str) -> None:
    assert old in SOFTMAX

    with pytest.raises(CompileError) as caught:
        parse(SOFTMAX.replace(old, new, 1))
    assert message in str(caught.value)


def test_an_empty_text_is_no_kernel() -> None:
    with pytest.raises(CompileError, match="line 1: expected 'kernel', found the end of the line"):
        parse("\n")
