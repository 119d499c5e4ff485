"""The closed set of scalar primitives: what every backend has to be able to emit.

Arguments have one type; the result has it too unless stated.  Floats follow IEEE 754, integers
wrap.
"""

from __future__ import annotations

from enum import Enum, auto


class Prim(Enum):
    """A scalar operation.  Text form: its name in lower case, `add(x, y)`."""

    __hash__ = object.__hash__  # a member is one object: Enum's own is a call in Python

    # arithmetic, floats and integers
    ADD = auto()
    SUB = auto()
    MUL = auto()
    NEG = auto()
    ABS = auto()
    DIV = auto()  # floats: true division; integers: toward zero, by zero gives 0
    MOD = auto()  # remainder with the sign of the dividend, as C's
    MIN = auto()  # NaN if one of them is
    MAX = auto()  # NaN if one of them is

    # comparison: result is bool
    EQ = auto()
    NE = auto()
    LT = auto()
    LE = auto()
    GT = auto()
    GE = auto()
    IS_NAN = auto()

    # bool and integers
    AND = auto()
    OR = auto()
    XOR = auto()
    NOT = auto()
    SHL = auto()  # shifts by more than the width give 0
    SHR = auto()  # arithmetic for signed types

    # choice: (bool, x, x)
    WHERE = auto()

    # floats: exact
    SQRT = auto()
    FLOOR = auto()
    CEIL = auto()
    TRUNC = auto()
    ROUND = auto()  # half to even
    COPYSIGN = auto()
    TO_F16 = auto()  # f32: the nearest number that f16 has
    TO_BF16 = auto()  # f32: the nearest number that bf16 has
    FMA = auto()  # x * y + z, rounded once

    # floats: within 2 ulp
    EXP = auto()
    EXP2 = auto()
    EXPM1 = auto()
    LOG = auto()
    LOG2 = auto()
    LOG10 = auto()
    LOG1P = auto()
    SIN = auto()
    COS = auto()
    TAN = auto()
    ASIN = auto()
    ACOS = auto()
    ATAN = auto()
    ATAN2 = auto()
    SINH = auto()
    COSH = auto()
    TANH = auto()
    ASINH = auto()
    ACOSH = auto()
    ATANH = auto()
    ERF = auto()
    ERFC = auto()
    NORMAL_CDF = auto()  # the normal distribution; exact beside 1, not in its tail
    POW = auto()
    HYPOT = auto()

    # i32: 64 random bits, of (key, key, counter, counter); see threefry.py
    THREEFRY_0 = auto()  # the first word
    THREEFRY_1 = auto()  # the second
    THREEFRY_ONE = auto()  # of (key, key, number, number): one of the two words of its half
    # i32, of (key, key, stream, number, number): one of the four of its quarter; see philox.py
    PHILOX_ONE = auto()


RANDOM = frozenset({Prim.THREEFRY_0, Prim.THREEFRY_1, Prim.THREEFRY_ONE, Prim.PHILOX_ONE})
ROUNDINGS = frozenset({Prim.TO_F16, Prim.TO_BF16})
COMPARISONS = frozenset({Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE, Prim.IS_NAN})
