"""Element types."""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch


class DType(Enum):
    """Type of an element; the value is its text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    __hash__ = object.__hash__  # a member is one object: Enum's own is a call in Python

    def __repr__(self) -> str:
        return self.value

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self in _FLOATS

    @property
    def is_signed(self) -> bool:
        """Whether it holds negative numbers."""
        return self not in (DType.U8, DType.BOOL)

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory."""
        return _BYTES[self]

    @property
    def computed_in(self) -> DType:
        """The type that arithmetic on it uses: half precision is widened."""
        return DType.F32 if self in (DType.F16, DType.BF16) else self


_FLOATS: Final = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_BYTES: Final = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
}

TORCH_DTYPES: Final = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
}


def from_torch(dtype: torch.dtype) -> DType | None:
    """Our type for torch's; None where there is none (complex, quantized, …)."""
    return TORCH_DTYPES.get(dtype)


# Types by their numbers in C++.
_SCALAR_TYPES: Final = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}


def scalar_type(dtype: torch.dtype) -> int:
    """A type by its number in C++."""
    return _SCALAR_TYPES[dtype]


def has_number(dtype: torch.dtype) -> bool:
    """Whether we know a type's number in C++: not those of quantised elements."""
    return dtype in _SCALAR_TYPES


def scalar_names() -> list[str]:
    """The names of types, at their numbers."""
    names = {number: str(dtype).removeprefix("torch.") for dtype, number in _SCALAR_TYPES.items()}
    return [names.get(number, f"type {number}") for number in range(max(names) + 1)]
