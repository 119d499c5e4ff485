"""Primitives and conversions as Triton text.

Arguments are texts of values that have the type they are computed in.  What Triton has no exact or
accurate operation for is one of libdevice's, or a function of device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from stator.core.dtypes import DType
from stator.loops.prims import Prim

# Of a value in a register, and of an element in memory.
TYPES: Final[Mapping[DType, str]] = {
    DType.F64: "tl.float64",
    DType.F32: "tl.float32",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.I64: "tl.int64",
    DType.I32: "tl.int32",
    DType.I16: "tl.int16",
    DType.I8: "tl.int8",
    DType.U8: "tl.uint8",
    DType.BOOL: "tl.int1",
}

_INFIX: Final[Mapping[Prim, str]] = {
    Prim.ADD: "+",
    Prim.SUB: "-",
    Prim.MUL: "*",
    Prim.EQ: "==",
    Prim.NE: "!=",
    Prim.LT: "<",
    Prim.LE: "<=",
    Prim.GT: ">",
    Prim.GE: ">=",
    Prim.AND: "&",
    Prim.OR: "|",
    Prim.XOR: "^",
}

_LIBDEVICE: Final[Mapping[Prim, str]] = {
    Prim.TRUNC: "trunc",
    Prim.ROUND: "nearbyint",
    Prim.COPYSIGN: "copysign",
    Prim.EXP: "exp",
    Prim.EXP2: "exp2",
    Prim.EXPM1: "expm1",
    Prim.LOG: "log",
    Prim.LOG2: "log2",
    Prim.LOG10: "log10",
    Prim.LOG1P: "log1p",
    Prim.SIN: "sin",
    Prim.COS: "cos",
    Prim.TAN: "tan",
    Prim.ASIN: "asin",
    Prim.ACOS: "acos",
    Prim.ATAN: "atan",
    Prim.ATAN2: "atan2",
    Prim.SINH: "sinh",
    Prim.COSH: "cosh",
    Prim.TANH: "tanh",
    Prim.ASINH: "asinh",
    Prim.ACOSH: "acosh",
    Prim.ATANH: "atanh",
    Prim.ERF: "erf",
    Prim.ERFC: "erfc",
    Prim.POW: "pow",
    Prim.HYPOT: "hypot",
}

# The hardware's own, which are off by some ulp.
_COARSE: Final[Mapping[Prim, str]] = {
    Prim.EXP: "tl.exp({})",
    Prim.DIV: "({} / {})",
    Prim.TANH: "coarse_tanh({})",
}

_OWN: Final[Mapping[Prim, str]] = {
    Prim.THREEFRY_0: "threefry_0",
    Prim.THREEFRY_1: "threefry_1",
    Prim.THREEFRY_ONE: "threefry_one",
    Prim.PHILOX_ONE: "philox_one",
}


def apply_text(prim: Prim, args: Sequence[str], dtype: DType, *, is_coarse: bool = False) -> str:
    """The primitive on arguments; `dtype` is that of the last one.

    `is_coarse`: a few ulp of f32 are lost when the result is rounded to half precision.
    """
    if is_coarse and dtype is DType.F32 and prim in _COARSE:
        return _COARSE[prim].format(*args)
    if prim in _INFIX:
        return f"({args[0]} {_INFIX[prim]} {args[1]})"
    if prim in _LIBDEVICE:
        return f"libdevice.{_LIBDEVICE[prim]}({', '.join(args)})"
    if prim in _OWN:
        return f"{_OWN[prim]}({', '.join(args)})"
    return _SPECIAL[prim](args, dtype)


def _normal_cdf(args: Sequence[str], dtype: DType) -> str:
    name = "normal_cdf" if dtype is DType.F32 else "libdevice.normcdf"
    return f"{name}({args[0]})"


def _divided(args: Sequence[str], dtype: DType) -> str:
    x, y = args
    if dtype is DType.F32:
        return f"tl.div_rn({x}, {y})"  # a plain division may be off by 2 ulp
    return f"({x} / {y})" if dtype.is_float else f"divided({x}, {y})"


def _remainder(args: Sequence[str], dtype: DType) -> str:
    x, y = args
    return f"libdevice.fmod({x}, {y})" if dtype.is_float else f"remainder({x}, {y})"


def _extreme(name: str, bits: str) -> Callable[[Sequence[str], DType], str]:
    def text(args: Sequence[str], dtype: DType) -> str:
        x, y = args
        if dtype is DType.BOOL:
            return f"({x} {bits} {y})"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if dtype.is_float else ""
        return f"tl.{name}({x}, {y}{nan})"

    return text


def _negative(args: Sequence[str], dtype: DType) -> str:
    # Triton's own minus subtracts from 0, which loses the sign of zero.
    return f"({args[0]} * -1.0)" if dtype.is_float else f"(0 - {args[0]})"


def _absolute(args: Sequence[str], dtype: DType) -> str:
    return f"tl.abs({args[0]})" if dtype.is_signed else args[0]


def _not(args: Sequence[str], dtype: DType) -> str:
    if dtype is DType.BOOL:
        return f"({args[0]} == 0)"
    return f"({args[0]} ^ {-1 if dtype.is_signed else 255})"


def _shifted_left(args: Sequence[str], dtype: DType) -> str:
    return f"shifted_left({args[0]}, {args[1]}, {8 * dtype.bytes})"


def _shifted_right(args: Sequence[str], dtype: DType) -> str:
    name = "shifted_right" if dtype.is_signed else "shifted_right_unsigned"
    return f"{name}({args[0]}, {args[1]}, {8 * dtype.bytes})"


def _root(args: Sequence[str], dtype: DType) -> str:
    return f"tl.sqrt_rn({args[0]})" if dtype is DType.F32 else f"libdevice.sqrt({args[0]})"


_SPECIAL: Final[Mapping[Prim, Callable[[Sequence[str], DType], str]]] = {
    Prim.NEG: _negative,
    Prim.NORMAL_CDF: _normal_cdf,
    Prim.ABS: _absolute,
    Prim.DIV: _divided,
    Prim.MOD: _remainder,
    Prim.MIN: _extreme("minimum", "&"),
    Prim.MAX: _extreme("maximum", "|"),
    Prim.IS_NAN: lambda args, dtype: f"({args[0]} != {args[0]})",
    Prim.NOT: _not,
    Prim.SHL: _shifted_left,
    Prim.SHR: _shifted_right,
    Prim.WHERE: lambda args, dtype: f"tl.where({', '.join(args)})",
    Prim.SQRT: _root,
    Prim.FLOOR: lambda args, dtype: f"tl.floor({args[0]})",
    Prim.CEIL: lambda args, dtype: f"tl.ceil({args[0]})",
    Prim.TO_F16: lambda args, dtype: f"{args[0]}.to(tl.float16).to(tl.float32)",
    Prim.TO_BF16: lambda args, dtype: f"{args[0]}.to(tl.bfloat16).to(tl.float32)",
    Prim.FMA: lambda args, dtype: f"tl.fma({', '.join(args)})",
}


def convert_text(value: str, source: DType, target: DType) -> str:
    """A value in another type, as the loop IR casts."""
    if source is target:
        return value
    if target is DType.BOOL:
        return f"({value} != 0)"
    if source.is_float and target in (DType.I16, DType.I8):
        value = f"{value}.to(tl.int32)"  # as eager converts: what does not fit wraps around
    if source.is_float and target is DType.U8:
        value = f"{value}.to(tl.int64)"
    return f"{value}.to({TYPES[target]})"


def number_text(value: float, dtype: DType) -> str:
    """A number as Python writes it inside of a kernel."""
    if dtype is DType.BOOL:
        return str(int(bool(value)))
    if not dtype.is_float:
        return str(int(value))
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return f'float("{number}")'
    return repr(number)
