"""Primitives in LLVM: one emitter each, for floats and for integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from stator.codegen.llvm import math
from stator.codegen.llvm.philox import emit_philox_one
from stator.codegen.llvm.threefry import emit_one, emit_threefry
from stator.codegen.llvm.types import from_memory, register, to_memory
from stator.codegen.llvm.writer import Writer
from stator.core.dtypes import DType
from stator.loops.prims import Prim

Emit: TypeAlias = Callable[[Writer, list[str], DType], str]  # arguments, and their type


def emit_prim(w: Writer, prim: Prim, args: list[str], dtype: DType) -> str:
    """The primitive on arguments of one type (the last argument's, for WHERE)."""
    table = _FLOAT if dtype.is_float else _INTEGER
    if prim in _ANY:
        return _ANY[prim](w, args, dtype)
    if prim in table:
        return table[prim](w, args, dtype)
    if dtype.is_float:
        kind = register(dtype)
        given = ", ".join(f"{kind} {arg}" for arg in args)
        return w.let(f"call {kind} @{math.FUNCTIONS[prim, dtype]}({given})")
    raise AssertionError(f"{prim.name} has no meaning on {dtype!r}; the verifier lets none through")


def _binary(operation: str) -> Emit:
    def emit(w: Writer, args: list[str], dtype: DType) -> str:
        return w.let(f"{operation} {register(dtype)} {args[0]}, {args[1]}")

    return emit


def _compare(ordered: str, signed: str, unsigned: str) -> Emit:
    def emit(w: Writer, args: list[str], dtype: DType) -> str:
        if dtype.is_float:
            return w.let(f"fcmp {ordered} {register(dtype)} {args[0]}, {args[1]}")
        predicate = signed if dtype.is_signed else unsigned
        return w.let(f"icmp {predicate} {register(dtype)} {args[0]}, {args[1]}")

    return emit


def _intrinsic(name: str) -> Emit:
    def emit(w: Writer, args: list[str], dtype: DType) -> str:
        kind = register(dtype)
        suffix = "f64" if kind == "double" else "f32" if kind == "float" else kind
        given = ", ".join(f"{kind} {arg}" for arg in args)
        return w.let(f"call {kind} @llvm.{name}.{suffix}({given})")

    return emit


def _where(w: Writer, args: list[str], dtype: DType) -> str:
    kind = register(dtype)
    return w.let(f"select i1 {args[0]}, {kind} {args[1]}, {kind} {args[2]}")


def _choose(w: Writer, args: list[str], dtype: DType, *, larger: bool) -> str:
    kind = register(dtype)
    if dtype is DType.BOOL:
        return w.let(f"{'or' if larger else 'and'} i1 {args[0]}, {args[1]}")
    predicate = ("s" if dtype.is_signed else "u") + ("gt" if larger else "lt")
    first = w.let(f"icmp {predicate} {kind} {args[0]}, {args[1]}")
    return w.let(f"select i1 {first}, {kind} {args[0]}, {kind} {args[1]}")


def _integer_abs(w: Writer, args: list[str], dtype: DType) -> str:
    if not dtype.is_signed:
        return args[0]
    kind = register(dtype)
    negative = w.let(f"icmp slt {kind} {args[0]}, 0")
    opposite = w.let(f"sub {kind} 0, {args[0]}")
    return w.let(f"select i1 {negative}, {kind} {opposite}, {kind} {args[0]}")


def _integer_divide(operation: str) -> Emit:
    def emit(w: Writer, args: list[str], dtype: DType) -> str:
        """By zero gives 0; the least number by -1 wraps instead of trapping."""
        kind = register(dtype)
        zero = w.let(f"icmp eq {kind} {args[1]}, 0")
        divisor = w.let(f"select i1 {zero}, {kind} 1, {kind} {args[1]}")
        if not dtype.is_signed:
            result = w.let(f"u{operation} {kind} {args[0]}, {divisor}")
            return w.let(f"select i1 {zero}, {kind} 0, {kind} {result}")
        minus = w.let(f"icmp eq {kind} {divisor}, -1")
        safe = w.let(f"select i1 {minus}, {kind} 1, {kind} {divisor}")
        result = w.let(f"s{operation} {kind} {args[0]}, {safe}")
        opposite = w.let(f"sub {kind} 0, {args[0]}") if operation == "div" else "0"
        signed = w.let(f"select i1 {minus}, {kind} {opposite}, {kind} {result}")
        return w.let(f"select i1 {zero}, {kind} 0, {kind} {signed}")

    return emit


def _shift(left: bool) -> Emit:
    def emit(w: Writer, args: list[str], dtype: DType) -> str:
        kind = register(dtype)
        width = int(kind[1:])
        wide = w.let(f"icmp uge {kind} {args[1]}, {width}")
        count = w.let(f"select i1 {wide}, {kind} {width - 1}, {kind} {args[1]}")
        if left:
            moved = w.let(f"shl {kind} {args[0]}, {count}")
            return w.let(f"select i1 {wide}, {kind} 0, {kind} {moved}")
        if dtype.is_signed:
            return w.let(f"ashr {kind} {args[0]}, {count}")
        moved = w.let(f"lshr {kind} {args[0]}, {count}")
        return w.let(f"select i1 {wide}, {kind} 0, {kind} {moved}")

    return emit


def _is_nan(w: Writer, args: list[str], dtype: DType) -> str:
    kind = register(dtype)
    return w.let(f"fcmp uno {kind} {args[0]}, {args[0]}") if dtype.is_float else "false"


def _copysign(w: Writer, args: list[str], dtype: DType) -> str:
    """By bits: LLVM would round through the intrinsic, to f16 by a function that nobody has."""
    kind = register(dtype)
    bits = "i64" if kind == "double" else "i32"
    sign = 1 << (63 if bits == "i64" else 31)
    size, from_ = (w.let(f"bitcast {kind} {arg} to {bits}") for arg in args)
    kept = w.let(f"and {bits} {size}, {sign - 1}")
    taken = w.let(f"and {bits} {from_}, {-sign}")
    both = w.let(f"or {bits} {kept}, {taken}")
    return w.let(f"bitcast {bits} {both} to {kind}")


def _through_memory(w: Writer, value: str, dtype: DType) -> str:
    """What a value would be if it were stored and loaded."""
    return from_memory(w, to_memory(w, value, dtype), dtype)


def _bool_or_integer(operation: str) -> Emit:
    return lambda w, args, dtype: w.let(f"{operation} {register(dtype)} {args[0]}, {args[1]}")


_ANY: Final[dict[Prim, Emit]] = {
    Prim.EQ: _compare("oeq", "eq", "eq"),
    Prim.NE: _compare("une", "ne", "ne"),
    Prim.LT: _compare("olt", "slt", "ult"),
    Prim.LE: _compare("ole", "sle", "ule"),
    Prim.GT: _compare("ogt", "sgt", "ugt"),
    Prim.GE: _compare("oge", "sge", "uge"),
    Prim.IS_NAN: _is_nan,
    Prim.WHERE: _where,
}

_FLOAT: Final[dict[Prim, Emit]] = {
    Prim.ADD: _binary("fadd"),
    Prim.SUB: _binary("fsub"),
    Prim.MUL: _binary("fmul"),
    Prim.DIV: _binary("fdiv"),
    Prim.MOD: _binary("frem"),
    Prim.NEG: lambda w, args, dtype: w.let(f"fneg {register(dtype)} {args[0]}"),
    Prim.ABS: _intrinsic("fabs"),
    Prim.MIN: _intrinsic("minimum"),
    Prim.MAX: _intrinsic("maximum"),
    Prim.SQRT: _intrinsic("sqrt"),
    Prim.FLOOR: _intrinsic("floor"),
    Prim.CEIL: _intrinsic("ceil"),
    Prim.TRUNC: _intrinsic("trunc"),
    Prim.ROUND: _intrinsic("roundeven"),
    Prim.COPYSIGN: _copysign,
    Prim.TO_F16: lambda w, args, dtype: _through_memory(w, args[0], DType.F16),
    Prim.TO_BF16: lambda w, args, dtype: _through_memory(w, args[0], DType.BF16),
    Prim.FMA: _intrinsic("fma"),
}

_INTEGER: Final[dict[Prim, Emit]] = {
    Prim.ADD: _binary("add"),
    Prim.SUB: _binary("sub"),
    Prim.MUL: _binary("mul"),
    Prim.DIV: _integer_divide("div"),
    Prim.MOD: _integer_divide("rem"),
    Prim.NEG: lambda w, args, dtype: w.let(f"sub {register(dtype)} 0, {args[0]}"),
    Prim.ABS: _integer_abs,
    Prim.MIN: lambda w, args, dtype: _choose(w, args, dtype, larger=False),
    Prim.MAX: lambda w, args, dtype: _choose(w, args, dtype, larger=True),
    Prim.AND: _bool_or_integer("and"),
    Prim.OR: _bool_or_integer("or"),
    Prim.XOR: _bool_or_integer("xor"),
    Prim.NOT: lambda w, args, dtype: w.let(f"xor {register(dtype)} {args[0]}, -1"),
    Prim.SHL: _shift(left=True),
    Prim.SHR: _shift(left=False),
    Prim.THREEFRY_0: lambda w, args, dtype: emit_threefry(w, args)[0],
    Prim.THREEFRY_1: lambda w, args, dtype: emit_threefry(w, args)[1],
    Prim.THREEFRY_ONE: lambda w, args, dtype: emit_one(w, args),
    Prim.PHILOX_ONE: lambda w, args, dtype: emit_philox_one(w, args),
}
