"""Element types in LLVM: in memory, in registers, and between them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from stator.core.dtypes import DType

if TYPE_CHECKING:
    from stator.codegen.llvm.writer import Writer

MEMORY: Final = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "half",
    DType.BF16: "i16",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.I16: "i16",
    DType.I8: "i8",
    DType.U8: "i8",
    DType.BOOL: "i8",
}

_WIDTH: Final = {DType.I64: 64, DType.I32: 32, DType.I16: 16, DType.I8: 8, DType.U8: 8}


def register(dtype: DType) -> str:
    """The type that arithmetic on `dtype` uses."""
    return "i1" if dtype is DType.BOOL else MEMORY[dtype.computed_in]


def literal(value: int | float | bool, dtype: DType) -> str:
    """A constant; floats by their bits, so that none is lost."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if not dtype.is_float:
        return str(int(value))
    number = float(value)
    if dtype.computed_in is DType.F32:
        number = _round_to_f32(number)
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def _round_to_f32(number: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def from_memory(w: Writer, value: str, dtype: DType) -> str:
    """A loaded element, widened to what is computed in."""
    match dtype:
        case DType.BOOL:
            return w.let(f"icmp ne i8 {value}, 0")
        case DType.F16:
            return w.let(f"fpext half {value} to float")
        case DType.BF16:
            wide = w.let(f"zext i16 {value} to i32")
            bits = w.let(f"shl i32 {wide}, 16")
            return w.let(f"bitcast i32 {bits} to float")
        case _:
            return value


def to_memory(w: Writer, value: str, dtype: DType) -> str:
    """A computed value, rounded to what is stored."""
    match dtype:
        case DType.BOOL:
            return w.let(f"zext i1 {value} to i8")
        case DType.F16:
            return w.let(f"fptrunc float {value} to half")
        case DType.BF16:
            return _to_bf16(w, value)
        case _:
            return value


def _to_bf16(w: Writer, value: str) -> str:
    """Round half to even; NaN stays NaN."""
    bits = w.let(f"bitcast float {value} to i32")
    low = w.let(f"lshr i32 {bits}, 16")
    odd = w.let(f"and i32 {low}, 1")
    bias = w.let(f"add i32 {odd}, 32767")
    rounded = w.let(f"add i32 {bits}, {bias}")
    high = w.let(f"lshr i32 {rounded}, 16")
    nan = w.let(f"fcmp uno float {value}, {value}")
    chosen = w.let(f"select i1 {nan}, i32 32704, i32 {high}")  # 0x7fc0
    return w.let(f"trunc i32 {chosen} to i16")


def convert(w: Writer, value: str, source: DType, target: DType, *, is_small: bool = False) -> str:
    """A computed value in another type; `is_small`: it is within 32 bits, or NaN."""
    source, target = source.computed_in, target.computed_in
    if source is target:
        return value
    if target is DType.BOOL:
        kind = register(source)
        if source.is_float:
            return w.let(f"fcmp une {kind} {value}, 0.0")
        return w.let(f"icmp ne {kind} {value}, 0")
    if source.is_float:
        return _from_float(w, value, source, target, is_small)
    if target.is_float:
        operation = "sitofp" if source.is_signed else "uitofp"
        return w.let(f"{operation} {register(source)} {value} to {register(target)}")
    return _between_integers(w, value, source, target)


def _from_float(w: Writer, value: str, source: DType, target: DType, is_small: bool) -> str:
    kind = register(source)
    if target.is_float:
        operation = "fpext" if target is DType.F64 else "fptrunc"
        return w.let(f"{operation} {kind} {value} to {register(target)}")
    # Narrow types go through a wider one and wrap, as eager's conversion does.
    # NaN is the least number of either, whose low bits are 0.
    is_wide = target is DType.I64 or (target is DType.U8 and not is_small)
    through = DType.I64 if is_wide else DType.I32
    wide = w.let(f"fptosi {kind} {value} to {register(through)}")
    return _between_integers(w, wide, through, target)


def _between_integers(w: Writer, value: str, source: DType, target: DType) -> str:
    if source is DType.BOOL:
        return w.let(f"zext i1 {value} to {register(target)}")
    have, want = _WIDTH[source], _WIDTH[target]
    if have == want:
        return value
    operation = "trunc" if have > want else "sext" if source.is_signed else "zext"
    return w.let(f"{operation} i{have} {value} to i{want}")
