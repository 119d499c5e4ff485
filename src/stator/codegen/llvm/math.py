"""Our own math functions as LLVM functions, within 2 ulp.

They are scalar and free of branches, so that a loop that calls them is vectorised once they are
inlined.  What LIBM names is left to the C library, one call an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from stator.codegen.llvm import math_erf, math_exp, math_inverse, math_log, math_pow, math_trig
from stator.codegen.llvm.math_value import DOUBLE, FLOAT, Body, Instructions, Value
from stator.core.dtypes import DType
from stator.loops.prims import Prim

_TYPES: Final = {DType.F32: FLOAT, DType.F64: DOUBLE}
_BINARY: Final = frozenset({Prim.POW, Prim.ATAN2, Prim.HYPOT})

_OURS: Final[Mapping[tuple[Prim, DType], Body]] = {
    (Prim.EXP, DType.F32): math_exp.exp,
    (Prim.EXP, DType.F64): math_exp.exp,
    (Prim.EXP2, DType.F32): math_exp.exp2,
    (Prim.EXP2, DType.F64): math_exp.exp2,
    (Prim.EXPM1, DType.F32): math_exp.expm1,
    (Prim.EXPM1, DType.F64): math_exp.expm1,
    (Prim.LOG, DType.F32): math_log.log_f32,
    (Prim.LOG, DType.F64): math_log.log_f64,
    (Prim.LOG2, DType.F32): math_log.log2_f32,
    (Prim.LOG10, DType.F32): math_log.log10_f32,
    (Prim.LOG1P, DType.F32): math_log.log1p_f32,
    (Prim.LOG1P, DType.F64): math_log.log1p_f64,
    (Prim.SIN, DType.F32): math_trig.sin_f32,
    (Prim.COS, DType.F32): math_trig.cos_f32,
    (Prim.TAN, DType.F32): math_trig.tan_f32,
    (Prim.ASIN, DType.F32): math_inverse.asin_f32,
    (Prim.ACOS, DType.F32): math_inverse.acos_f32,
    (Prim.ATAN, DType.F32): math_inverse.atan_f32,
    (Prim.ATAN2, DType.F32): math_inverse.atan2_f32,
    (Prim.SINH, DType.F32): math_exp.sinh,
    (Prim.SINH, DType.F64): math_exp.sinh,
    (Prim.COSH, DType.F32): math_exp.cosh,
    (Prim.COSH, DType.F64): math_exp.cosh,
    (Prim.TANH, DType.F32): math_exp.tanh,
    (Prim.TANH, DType.F64): math_exp.tanh,
    (Prim.ASINH, DType.F32): math_inverse.asinh_f32,
    (Prim.ACOSH, DType.F32): math_inverse.acosh_f32,
    (Prim.ATANH, DType.F32): math_inverse.atanh_f32,
    (Prim.ERF, DType.F32): math_erf.erf,
    (Prim.ERF, DType.F64): math_erf.erf,
    (Prim.ERFC, DType.F32): math_erf.erfc_f32,
    (Prim.NORMAL_CDF, DType.F32): math_erf.normal_cdf_f32,
    (Prim.NORMAL_CDF, DType.F64): math_erf.normal_cdf_f64,
    (Prim.POW, DType.F32): math_pow.pow_f32,
    (Prim.HYPOT, DType.F32): math_inverse.hypot_f32,
}

_ALL: Final = (
    Prim.EXP, Prim.EXP2, Prim.EXPM1, Prim.LOG, Prim.LOG2, Prim.LOG10, Prim.LOG1P,
    Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.ATAN2,
    Prim.SINH, Prim.COSH, Prim.TANH, Prim.ASINH, Prim.ACOSH, Prim.ATANH,
    Prim.ERF, Prim.ERFC, Prim.NORMAL_CDF, Prim.POW, Prim.HYPOT,
)  # fmt: skip

LIBM: Final[Mapping[tuple[Prim, DType], str]] = {
    (prim, dtype): prim.name.lower() + ("f" if dtype is DType.F32 else "")
    for prim in _ALL
    for dtype in _TYPES
    if (prim, dtype) not in _OURS
}

FUNCTIONS: Final[Mapping[tuple[Prim, DType], str]] = {
    (prim, dtype): LIBM.get((prim, dtype), f"stator_{prim.name.lower()}_{dtype.value}")
    for prim in _ALL
    for dtype in _TYPES
}


def definitions(needed: Iterable[tuple[Prim, DType]]) -> str:
    """LLVM text that defines or declares the functions, each once, in the order of FUNCTIONS."""
    wanted = set(needed)
    return "\n".join(_definition(*key) for key in FUNCTIONS if key in wanted)


def _definition(prim: Prim, dtype: DType) -> str:
    type_ = _TYPES[dtype]
    name = FUNCTIONS[prim, dtype]
    arguments = ("%x", "%y") if prim in _BINARY else ("%x",)
    if (prim, dtype) in LIBM:
        types = ", ".join(type_ for _ in arguments)
        return f"declare {type_} @{name}({types}) nounwind nonlazybind memory(none) willreturn\n"
    instructions = Instructions()
    result = _OURS[prim, dtype](*(Value(instructions, type_, name) for name in arguments))
    signature = ", ".join(f"{type_} {argument}" for argument in arguments)
    return "\n".join(
        (
            f"define internal {type_} @{name}({signature}) "
            "alwaysinline nounwind memory(none) willreturn {",
            *instructions.lines,
            f"  ret {type_} {result.name}",
            "}",
            "",
        )
    )
