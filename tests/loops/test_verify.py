"""The verifier: right kernels pass, and each invariant is noticed when it is broken."""

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings

from stator.core.dtypes import DType
from stator.errors import VerifyError
from stator.loops.build import apply, const
from stator.loops.index import Axis, Index
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Apply,
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
from stator.loops.prims import RANDOM, Prim
from stator.loops.verify import argument_count, verify
from tests.fuzz.kernels import kernels

HEADER: Final = """\
kernel k
  buffer x: f32[32]
  buffer h: bf16[32]
  buffer n: i64[32]
  buffer b: bool[32]
  buffer out: f32[32]
  buffer ints: i64[32]
  buffer bools: bool[32]
  buffer dynamic: f32[4*s0]
  scratch e: f32[8]
  outer i0: 4
"""
# Each passes as it stands.
RIGHT: Final = {
    "pointwise": "stage i1: 8\n out[8*i0 + i1] = add(x[8*i0 + i1], h[8*i0 + i1])",
    "reduction": "stage i1: 8\n acc sum= x[8*i0 + i1]\n stage\n out[i0] = acc",
    "scratch": "stage i1: 8\n e[i1] = x[i1]\n stage i1: 8\n out[8*i0 + i1] = e[-i1 + 7]",
    "scratch at once": "stage i1: 8\n e[i1] = x[i1]\n out[8*i0 + i1] = neg(e[i1])",
    "gather": "stage i1: 8\n out[8*i0 + i1] = x[[n[i0]] + i1]",
    "scatter": "stage i1: 8\n out[[n[8*i0 + i1]]] = x[i1]",
    "in place": "stage i1: 8\n out[8*i0 + i1] = add(out[8*i0 + i1], 1.0:f32)",
    "own row": "stage i1: 8\n out[8*i0 + i1] = x[i1]\n stage\n ints[i0] = i64(out[8*i0 + 7])",
    "reversed": "stage i1: s0\n acc sum= dynamic[-i1 + s0 - 1]\n stage\n out[i0] = acc",
    "halves": "stage\n out[2*i0] = x[0]\n out[2*i0 + 1] = x[1]",
    "unit axis": "stage i1: 1\n out[i0] = x[i0]",
    "empty axis": "stage i1: 0\n out[i0 + 100*i1] = x[i0 + 100*i1 + 90]",
    "cannot tell": "stage i1: s0\n out[i0*s0 + i1] = dynamic[4*(i1 // 4) + 3]",
    "choice": "stage\n out[i0] = where(lt(x[i0], 0.0:f32), f32(n[i0]), f32(b[i0]))",
    "minimum of bools": "stage\n bools[i0] = max(b[i0], not(b[i0]))",
}
WRONG: Final = {
    "mixed types": ("stage\n out[i0] = add(x[i0], f64(x[i0]))", "add takes one type"),
    "condition": ("stage\n out[i0] = where(x[i0], x[i0], x[i0])", "condition of where needs bool"),
    "float shift": ("stage\n out[i0] = shl(x[i0], x[i0])", "shl does not take f32"),
    "bool sum": ("stage\n bools[i0] = add(b[i0], b[i0])", "add does not take bool"),
    "integer exp": ("stage\n ints[i0] = exp(n[i0])", "exp does not take i64"),
    "arguments": ("stage\n out[i0] = add(x[i0])", "add takes 2 arguments, not 1"),
    "fma": ("stage\n out[i0] = fma(x[i0], x[i0])", "fma takes 3 arguments, not 2"),
    "result": ("stage\n out[i0] = lt(x[i0], x[i0]):f32", "result of lt needs bool, not f32"),
    "half computed": ("stage\n out[i0] = f32(bf16(x[i0]))", "bf16 is computed in"),
    "half loaded": ("stage\n out[i0] = f32(h[i0]:bf16)", "bf16 is computed in"),
    "load": ("stage\n out[i0] = f32(x[i0]:f64)", "load of x needs f32, not f64"),
    "store": ("stage\n out[i0] = n[i0]", "store to out needs f32, not i64"),
    "constant": ("stage\n out[i0] = 2:f32", "2 is no constant of f32"),
    "constant too large": ("stage\n out[i0] = f32(300:u8)", "300 does not fit u8"),
    "constant too small": ("stage\n out[i0] = f32(-129:i8)", "-129 does not fit i8"),
    "bool index": ("stage\n bools[i0] = value(i0):bool", "an index is no bool"),
    "index of floats": ("stage\n out[i0] = x[[x[i0]]]", "an index is computed in f32"),
    "any of floats": ("stage i1: 8\n acc any= x[i1]", "any does not combine f32"),
    "sum of bools": ("stage i1: 8\n acc sum= b[i1]", "sum does not combine bool"),
    "read at once": ("stage i1: 8\n acc sum= x[i1]\n out[8*i0 + i1] = acc", "no earlier stage"),
    "two types": (
        "stage i1: 8\n acc sum= x[i1]\n stage\n ints[i0] = acc:i64",
        "accumulator acc needs f32, not i64",
    ),
    "twice": ("stage i1: 8\n acc sum= x[i1]\n stage i1: 8\n acc sum= x[i1]", "accumulated twice"),
    "early load": ("stage i1: 8\n out[8*i0 + i1] = e[i1]\n e[i1] = x[i1]", "loaded before"),
    "neighbour": (
        "stage i1: 8\n e[i1] = x[i1]\n out[8*i0 + i1] = e[-i1 + 7]",
        "scratch e is loaded before it is stored",
    ),
    "neighbour's output": ("stage\n out[i0] = out[-i0 + 3]", "out is stored to at another index"),
    "neighbour in a loop": (
        "stage i1: 8\n out[8*i0 + i1] = out[8*i0 - i1 + 7]",
        "out is stored to at another index",
    ),
    "neighbour's row": (
        "stage i1: 4\n out[8*i0 + i1] = x[i1]\n stage\n bools[i0] = lt(out[8*i0 + 5], x[i0])",
        "out is stored to at another index",
    ),
    "past the end": ("stage i1: 8\n out[8*i0 + i1] = x[8*i0 + i1 + 1]", "x ends before"),
    "store past the end": ("stage i1: 9\n out[8*i0 + i1] = x[i1]", "out ends before"),
    "below zero": ("stage\n out[i0] = x[i0 - 1]", "i0 - 1 is negative"),
    "past a symbol": ("stage i1: s0\n acc sum= dynamic[4*i1 + 4]", "dynamic ends before"),
    "below a symbol": ("stage i1: s0\n acc sum= dynamic[-i1 + s0 - 2]", "is negative"),
    "always outside": ("stage\n out[i0] = x[(i0 // 2) + 32]", "x ends before"),
    "gathered column": ("stage\n out[i0] = f32(n[[n[i0 + 30]]])", "n ends before"),
    "same element": ("stage\n out[0] = x[i0]", "all iterations of i0 store to the same element"),
    "same inner element": ("stage i1: 8\n out[i0] = x[i1]", "all iterations of i1 store"),
    "same scratch": ("stage i1: 8\n e[0] = x[i1]", "all iterations of i1 store"),
    "overlap": ("stage\n out[i0] = x[i0]\n out[i0 + 1] = x[i0]", "two iterations of i0 store"),
    "shadow": ("stage i0: 8\n out[i0] = x[i0]", "axis i0 hides another one"),
    "division by zero": ("stage\n out[i0] = x[(i0 // 0)]", "divides by a number that is not"),
    "axis and symbol": ("stage s0: 4\n out[4*i0 + s0] = dynamic[s0]", "an axis and a symbol"),
    "buffer and accumulator": ("stage i1: 8\n x sum= x[i1]", "a buffer and an accumulator"),
}


def checked(stages: str) -> None:
    verify(parse(HEADER + stages))


@pytest.mark.parametrize("stages", RIGHT.values(), ids=RIGHT.keys())
def test_right_kernels_pass(stages: str) -> None:
    checked(stages)


@pytest.mark.parametrize(("stages", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_kernels_are_refused(stages: str, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        checked(stages)
    assert message in str(caught.value)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(kernels())
def test_fuzzed_kernels_pass(kernel: Kernel) -> None:
    verify(kernel)


def test_the_statement_is_named() -> None:
    with pytest.raises(VerifyError) as caught:
        checked("stage\n out[i0] = add(x[i0], n[i0])")
    assert caught.value.where == "k: out[i0] = add(x[i0], n[i0])"


# --- what the text form cannot say ---

I0, I1 = Axis("i0", Index.of(4)), Axis("i1", Index.of(4))
X, OUT = Buffer("x", DType.F32, Index.of(4)), Buffer("out", DType.F32, Index.of(4))
LOAD = Load(DType.F32, X, Index.of(I0))


def storing(value: Expr) -> Kernel:
    return Kernel("k", (I0,), (Stage((), (Store(OUT, Index.of(I0), value),)),))


def refused(kernel: Kernel, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(kernel)
    assert message in str(caught.value)


def test_axes_of_other_stages_are_not_in_scope() -> None:
    refused(storing(Load(DType.F32, X, Index.of(I1))), "axis i1 is not in scope")
    refused(storing(Load(DType.F32, X, Index.of(I1) // 2)), "axis i1 is not in scope")
    same_name = Axis("i0", Index.of(2))
    refused(storing(Load(DType.F32, X, Index.of(same_name))), "axis i0 is not in scope")


def test_accumulators_have_to_exist() -> None:
    refused(storing(Accumulated(DType.F32, "acc")), "no earlier stage accumulates acc")


def test_buffers_of_one_name_are_one_buffer() -> None:
    other = Load(DType.F32, Buffer("x", DType.F32, Index.of(5)), Index.of(I0))
    refused(storing(apply(Prim.ADD, LOAD, other)), "two buffers have the name x")


def test_names_are_names() -> None:
    strange = Load(DType.F32, Buffer("x y", DType.F32, Index.of(4)), Index.of(I0))
    refused(storing(strange), "'x y' is no name")


def test_sizes_are_made_of_numbers_and_symbols() -> None:
    growing = Axis("i1", Index.of(I0))
    stage = Stage((growing,), (Accumulate("acc", Combine.SUM, LOAD),))
    refused(Kernel("k", (I0,), (stage,)), "the size of i1 is more than numbers and symbols")
    negative = Axis("i0", Index.of(-3))
    refused(Kernel("k", (negative,), ()), "the size of i0 is negative")


def test_expressions_are_of_the_known_kinds() -> None:
    refused(storing(Expr(DType.F32)), "Expr is no expression of the loop IR")


def test_results_have_the_type_of_their_arguments() -> None:
    wide = const(1.0, DType.F64)
    refused(storing(Apply(DType.F32, Prim.ADD, (wide, wide))), "result of add needs f64, not f32")


def test_constants_of_the_wrong_kind() -> None:
    refused(storing(Const(DType.F32, True)), "True is no constant of f32")


def test_indices_have_every_number_type() -> None:
    verify(storing(IndexValue(DType.F32, Index.of(I0))))
    refused(storing(IndexValue(DType.BF16, Index.of(I0))), "bf16 is computed in")


def applied(prim: Prim, dtype: DType) -> Kernel:
    """A kernel that applies the primitive to constants."""
    args: list[Expr] = [const(1, dtype)] * argument_count(prim)
    if prim is Prim.WHERE:
        args[0] = const(True, DType.BOOL)
    value = apply(prim, *args)
    out = Buffer("out", value.dtype, Index.of(4))
    return Kernel("k", (I0,), (Stage((), (Store(out, Index.of(I0), value),)),))


LOGIC: Final = (Prim.AND, Prim.OR, Prim.XOR, Prim.NOT, Prim.SHL, Prim.SHR)


@pytest.mark.parametrize("prim", Prim, ids=lambda prim: prim.name.lower())
def test_primitives_take_floats_unless_they_are_of_bits(prim: Prim) -> None:
    if prim not in (*LOGIC, *RANDOM):
        verify(applied(prim, DType.F32))
        return
    verify(applied(prim, DType.I32 if prim in RANDOM else DType.I64))
    refused(applied(prim, DType.F32), f"{prim.name.lower()} does not take f32")


@pytest.mark.parametrize("prim", [Prim.ADD, Prim.DIV, Prim.MOD, Prim.MIN, Prim.LT, Prim.WHERE])
def test_arithmetic_takes_integers(prim: Prim) -> None:
    verify(applied(prim, DType.I32))


@pytest.mark.parametrize("prim", [Prim.SQRT, Prim.FLOOR, Prim.FMA, Prim.EXP, Prim.POW])
def test_functions_take_no_integers(prim: Prim) -> None:
    refused(applied(prim, DType.I32), f"{prim.name.lower()} does not take i32")
