"""Values of a function being written: arithmetic on them writes LLVM instructions.

    x = argument * 2.0 + 1.0

appends `%1 = fmul float %x, 2.0` and `%2 = fadd float %1, 1.0`.  Numbers stand for constants of
the type of the other operand.  Comparisons of floats are ordered: false where one is NaN.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Operand: TypeAlias = "Value | float"  # int too: every int is a float to the type checker
Body: TypeAlias = "Callable[..., Value]"  # from the arguments of a function to its result

FLOAT: Final = "float"
DOUBLE: Final = "double"
I32: Final = "i32"
I64: Final = "i64"
BOOL: Final = "i1"

_SUFFIX: Final = {FLOAT: "f32", DOUBLE: "f64", I32: "i32", I64: "i64"}
_AS_INT: Final = {FLOAT: I32, DOUBLE: I64}
_EXPONENT: Final = {FLOAT: (23, 127), DOUBLE: (52, 1023)}  # its lowest bit, and that of 1
_AS_FLOAT: Final = {integer: real for real, integer in _AS_INT.items()}


@dataclass(slots=True)
class Instructions:
    """Instructions of one function, in order."""

    lines: list[str] = field(default_factory=list)

    def append(self, type_: str, text: str) -> Value:
        """The result of the instruction `text`."""
        name = f"%{len(self.lines) + 1}"
        self.lines.append(f"  {name} = {text}")
        return Value(self, type_, name)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An SSA value."""

    owner: Instructions
    type: str
    name: str

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point number."""
        return self.type in _AS_INT

    def like(self, operand: Operand) -> Value:
        """`operand`, or the constant of this value's type that it stands for."""
        if isinstance(operand, Value):
            assert operand.type == self.type, f"{operand.type} meets {self.type}"
            return operand
        return Value(self.owner, self.type, literal(self.type, operand))

    def _binary(self, float_name: str, int_name: str, left: Operand, right: Operand) -> Value:
        name = float_name if self.is_float else int_name
        assert name, f"no such operation on {self.type}"
        text = f"{name} {self.type} {self.like(left).name}, {self.like(right).name}"
        return self.owner.append(self.type, text)

    def _compare(self, predicate: str, other: Operand) -> Value:
        kind = f"fcmp o{predicate}" if self.is_float else f"icmp {_INTEGER_ORDER[predicate]}"
        return self.owner.append(BOOL, f"{kind} {self.type} {self.name}, {self.like(other).name}")

    def __add__(self, other: Operand) -> Value:
        return self._binary("fadd", "add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self._binary("fsub", "sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self._binary("fsub", "sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return self._binary("fmul", "mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", "", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", "", other, self)

    def __and__(self, other: Operand) -> Value:
        return self._binary("", "and", self, other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("", "or", self, other)

    def __xor__(self, other: Operand) -> Value:
        return self._binary("", "xor", self, other)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("", "shl", self, other)

    def __rshift__(self, other: Operand) -> Value:
        """The sign comes in from the left."""
        return self._binary("", "ashr", self, other)

    def shift_right_zero(self, other: Operand) -> Value:
        """Zeros come in from the left."""
        return self._binary("", "lshr", self, other)

    def __neg__(self) -> Value:
        return self.owner.append(self.type, f"fneg {self.type} {self.name}")

    def __lt__(self, other: Operand) -> Value:
        return self._compare("lt", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("le", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare("gt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare("ge", other)

    def equals(self, other: Operand) -> Value:
        """Whether both are the same number."""
        return self._compare("eq", other)

    def is_nan(self) -> Value:
        """Whether it is not a number."""
        return self.owner.append(BOOL, f"fcmp uno {self.type} {self.name}, {self.name}")


_INTEGER_ORDER: Final = {"lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge", "eq": "eq"}


def literal(type_: str, number: float) -> str:
    """The constant as LLVM writes it: floats by the bits of the double they are."""
    if type_ not in _AS_INT:
        return str(int(number))
    if type_ == FLOAT:
        number = struct.unpack("f", struct.pack("f", number))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', number))[0]:016X}"


def _intrinsic(name: str, first: Value, *rest: Operand) -> Value:
    operands = [first, *(first.like(operand) for operand in rest)]
    arguments = ", ".join(f"{operand.type} {operand.name}" for operand in operands)
    text = f"call {first.type} @llvm.{name}.{_SUFFIX[first.type]}({arguments})"
    return first.owner.append(first.type, text)


def fma(x: Value, y: Operand, z: Operand) -> Value:
    """x * y + z, rounded once."""
    return _intrinsic("fma", x, y, z)


def absolute(x: Value) -> Value:
    """|x|"""
    return _intrinsic("fabs", x)


def square_root(x: Value) -> Value:
    """Correctly rounded."""
    return _intrinsic("sqrt", x)


def copy_sign(magnitude: Value, sign: Value) -> Value:
    """|magnitude| with the sign of `sign`."""
    return _intrinsic("copysign", magnitude, sign)


def nearest(x: Value) -> Value:
    """The nearest integer, as a float; halves to even."""
    return _intrinsic("rint", x)


def truncated(x: Value) -> Value:
    """The integer part, as a float."""
    return _intrinsic("trunc", x)


def shift_in(high: Value, low: Value, count: Value) -> Value:
    """`high` shifted left by `count` modulo its width, the top of `low` coming in."""
    return _intrinsic("fshl", high, low, count)


def select(condition: Value, yes: Operand, no: Operand) -> Value:
    """`yes` where the condition holds, otherwise `no`; one of them must be a value."""
    pattern = yes if isinstance(yes, Value) else no
    assert isinstance(pattern, Value), "a choice between two numbers has no type"
    yes, no = pattern.like(yes), pattern.like(no)
    text = f"select i1 {condition.name}, {yes.type} {yes.name}, {no.type} {no.name}"
    return condition.owner.append(yes.type, text)


def at_least(x: Value, bound: Operand) -> Value:
    """The greater one; NaN where x is."""
    bound = x.like(bound)
    return select(bound > x, bound, x)


def at_most(x: Value, bound: Operand) -> Value:
    """The lesser one; NaN where x is."""
    bound = x.like(bound)
    return select(bound < x, bound, x)


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c0 + c1 x + c2 x² + …"""
    *rest, last = coefficients
    total = x.like(last)
    for coefficient in reversed(rest):
        total = fma(total, x, coefficient)
    return total


def _convert(x: Value, operation: str, type_: str) -> Value:
    return x.owner.append(type_, f"{operation} {x.type} {x.name} to {type_}")


def bits(x: Value) -> Value:
    """The bits of a float, as an integer."""
    return _convert(x, "bitcast", _AS_INT[x.type])


def from_bits(x: Value) -> Value:
    """The float of these bits."""
    return _convert(x, "bitcast", _AS_FLOAT[x.type])


def to_float(x: Value) -> Value:
    """The integer as a float of its width."""
    return _convert(x, "sitofp", _AS_FLOAT[x.type])


def widened(x: Value) -> Value:
    """f32 as f64, or i32 as i64 without a sign."""
    return _convert(x, "fpext", DOUBLE) if x.is_float else _convert(x, "zext", I64)


def narrowed(x: Value) -> Value:
    """f64 rounded to f32, or the low half of an i64."""
    return _convert(x, "fptrunc", FLOAT) if x.is_float else _convert(x, "trunc", I32)


def power_of_two(exponent: Value) -> Value:
    """2**exponent as a float as wide as the integer; the exponent must be that of a normal one."""
    shift, bias = _EXPONENT[_AS_FLOAT[exponent.type]]
    return from_bits((exponent + bias) << shift)


def raised(x: Value, exponent: Operand) -> Value:
    """x * 2**exponent, where both are normal numbers: a sum of integers."""
    shift, _ = _EXPONENT[x.type]
    low = exponent << shift if isinstance(exponent, Value) else int(exponent) << shift
    return from_bits(bits(x) + low)
