"""Random scalar expressions, built so that two right implementations agree on them.

A backend may reassociate float sums and has 2 ulp of freedom in functions such as exp.  So every
float carries how far it can be trusted, and nothing that would blow a small difference up (a
comparison, a rounding, a difference of near numbers) is applied to one that is not exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from hypothesis import strategies as st

from stator.core.dtypes import DType
from stator.loops.build import apply, const
from stator.loops.index import Axis
from stator.loops.ir import Buffer, Cast, Expr, IndexValue, Load
from stator.loops.prims import Prim
from tests.fuzz.accesses import Draw, gather, loaded_index

F32, F64, BOOL = DType.F32, DType.F64, DType.BOOL
INTEGERS: Final = (DType.I64, DType.I32, DType.U8, DType.I16, DType.I8)
# Floats more often than the rest: they have the most primitives.
ARITHMETIC: Final = (F32, F32, F32, F64, F64, BOOL, *INTEGERS)
HALVES: Final = (DType.BF16, DType.F16)
STEP: Final = 0.25  # floats in memory are multiples of this …
LIMIT: Final = 8.0  # … up to this, apart from NaN and infinities

_NUMBERS: Final = (0.0, 1.0, -1.5, 0.25, 3.0, -0.0, float("inf"), float("-inf"))
_INTEGER_UNARY: Final = (Prim.NEG, Prim.ABS, Prim.NOT)
_INTEGER_BINARY: Final = (
    *(Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.MOD, Prim.MIN, Prim.MAX),
    *(Prim.AND, Prim.OR, Prim.XOR, Prim.SHL, Prim.SHR),
)
_COMPARISONS: Final = (Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE)
_ROUNDING: Final = (Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND)
# A small relative change of the argument changes the result by no more, relatively.
_CALM: Final = (Prim.TANH, Prim.ATAN, Prim.ERF, Prim.ASINH)
_FUNCTIONS: Final = (
    *(Prim.EXP, Prim.EXP2, Prim.EXPM1, Prim.LOG, Prim.LOG2, Prim.LOG10, Prim.LOG1P),
    *(Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.SINH, Prim.COSH),
    *(Prim.ACOSH, Prim.ATANH, Prim.ERFC),
)
_FUNCTION_LIMIT: Final = 9.0  # exp, cosh and erfc of it stay in the normal range of f32


class Trust(IntEnum):
    """How equal two right implementations are."""

    NEAR = 0  # up to a small relative difference; signs of zeros may differ
    VALUE = 1  # equal, but zeros may differ in sign
    BITS = 2  # the same, apart from the bits of NaN


@dataclass(frozen=True, slots=True)
class Known:
    """An expression, and what is known of its value where that is finite."""

    expr: Expr
    trust: Trust = Trust.BITS
    limit: float = float("inf")  # its size
    step: float = 0.0  # it is a multiple of this; 0 says nothing

    @property
    def dtype(self) -> DType:
        return self.expr.dtype

    def sums_exactly(self, bits: int) -> bool:
        """Whether thousands of such numbers have the same sum in every order."""
        return self.trust >= Trust.VALUE and self.step > 0 and self.limit / self.step < 2**bits


def converted(expr: Expr, dtype: DType) -> Expr:
    """A cast, of constants too."""
    return expr if expr.dtype is dtype else Cast(dtype, expr)


def on_grid(expr: Expr, limit: float, step: float, trust: Trust) -> Known:
    """Known multiples of `step`; as long as they are exact in f32."""
    if trust >= Trust.VALUE and step > 0 and limit / step < 2**22:
        return Known(expr, trust, limit, step)
    return Known(expr, trust)


@dataclass
class Expressions:
    """Makes expressions for the statements of one stage."""

    draw: Draw
    axes: Sequence[Axis]
    fresh: Callable[[str], str]
    known: list[Known] = field(default_factory=list)  # made before and still in scope

    def make(self, dtype: DType, depth: int) -> Known:
        """An expression of a type that arithmetic uses."""
        if depth <= 0 or self.draw(st.integers(0, 5)) == 0:
            found = self.leaf(dtype)
        elif dtype is BOOL:
            found = self.boolean(depth - 1)
        elif dtype.is_float:
            found = self.floating(dtype, depth - 1)
        else:
            found = self.integer(dtype, depth - 1)
        self.known.append(found)
        return found

    def leaf(self, dtype: DType) -> Known:
        again = [known for known in self.known if known.dtype is dtype]
        kind = self.draw(st.integers(0, 7))
        if kind <= 2 and again:
            found: Known = self.draw(st.sampled_from(again[-8:]))
            return found
        if kind == 3:
            return self.constant(dtype)
        if kind == 4 and dtype is DType.I64:
            return Known(IndexValue(dtype, loaded_index(self.draw, self.axes)[0]))
        return self.load(dtype)

    def constant(self, dtype: DType) -> Known:
        if dtype is BOOL:
            return Known(const(self.draw(st.booleans()), dtype))
        if not dtype.is_float:
            low = -7 if dtype.is_signed else 0
            return Known(const(self.draw(st.integers(low, 9)), dtype))
        number = self.draw(st.sampled_from(_NUMBERS))
        limit = abs(number) if abs(number) < LIMIT else 0.0
        return on_grid(const(number, dtype), limit, STEP, Trust.BITS)

    def load(self, dtype: DType) -> Known:
        stored = dtype
        if dtype is F32:
            stored = self.draw(st.sampled_from((F32, F32, *HALVES)))
        if self.axes and self.draw(st.integers(0, 5)) == 5:
            expr: Expr = gather(self.draw, self.axes, self.fresh, stored)
        else:
            index, length = loaded_index(self.draw, self.axes)
            expr = Load(dtype, Buffer(self.fresh("x"), stored, length), index)
        return on_grid(expr, LIMIT, STEP, Trust.BITS) if dtype.is_float else Known(expr)

    # --- bool and integers: exact, whatever is done ---

    def boolean(self, depth: int) -> Known:
        match self.draw(st.integers(0, 4)):
            case 0:
                prim = self.draw(st.sampled_from((Prim.AND, Prim.OR, Prim.XOR)))
                return Known(apply(prim, *(self.make(BOOL, depth).expr for _ in range(2))))
            case 1:
                return Known(apply(Prim.NOT, self.make(BOOL, depth).expr))
            case 2:
                dtype = self.draw(st.sampled_from((F32, F64)))
                return Known(apply(Prim.IS_NAN, self.exact(dtype, depth).expr))
            case 3:
                dtype = self.draw(st.sampled_from(ARITHMETIC))
                return Known(converted(self.exact(dtype, depth).expr, BOOL))
            case _:
                dtype = self.draw(st.sampled_from(ARITHMETIC))
                prim = self.draw(st.sampled_from(_COMPARISONS))
                return Known(apply(prim, *(self.exact(dtype, depth).expr for _ in range(2))))

    def integer(self, dtype: DType, depth: int) -> Known:
        match self.draw(st.integers(0, 6)):
            case 0:
                prim = self.draw(st.sampled_from(_INTEGER_UNARY))
                return Known(apply(prim, self.make(dtype, depth).expr))
            case 1:
                return self.chosen(dtype, depth)
            case 2:
                source = self.draw(st.sampled_from((*INTEGERS, BOOL)))
                return Known(converted(self.make(source, depth).expr, dtype))
            case 3:
                value = self.exact(self.draw(st.sampled_from((F32, F64))), depth).expr
                # What does not fit (NaN too) is left out: no result of converting it is right.
                is_small = apply(Prim.LE, apply(Prim.ABS, value), const(100.0, value.dtype))
                return Known(converted(apply(Prim.WHERE, is_small, value, 0.0), dtype))
            case _:
                prim = self.draw(st.sampled_from(_INTEGER_BINARY))
                return Known(apply(prim, *(self.make(dtype, depth).expr for _ in range(2))))

    def chosen(self, dtype: DType, depth: int) -> Known:
        condition = self.make(BOOL, depth).expr
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        expr = apply(Prim.WHERE, condition, one.expr, other.expr)
        step = min(one.step, other.step)
        return on_grid(expr, max(one.limit, other.limit), step, min(one.trust, other.trust))

    # --- floats ---

    def exact(self, dtype: DType, depth: int) -> Known:
        """An expression of which every bit can be relied on, but for the sign of zeros."""
        made = self.make(dtype, depth)
        return made if made.trust >= Trust.VALUE else self.load(dtype)

    def grid(self, dtype: DType, depth: int, limit: float = _FUNCTION_LIMIT) -> Known:
        """An exact expression in a range where functions neither overflow nor underflow."""
        made = self.make(dtype, depth)
        is_calm = made.trust is Trust.BITS and made.step > 0 and made.limit <= limit
        return made if is_calm else self.load(dtype)

    def floating(self, dtype: DType, depth: int) -> Known:
        match self.draw(st.integers(0, 12)):
            case 0 | 1:
                return self.sum(dtype, depth)
            case 2:
                return self.product(dtype, depth)
            case 3:
                return self.quotient(dtype, depth)
            case 4:
                return self.extremum(dtype, depth)
            case 5:
                return self.chosen(dtype, depth)
            case 6:
                return self.unary(dtype, depth)
            case 7:
                return self.conversion(dtype, depth)
            case 8:
                return self.exact_only(dtype, depth)
            case _:
                return self.function(dtype, depth)

    def sum(self, dtype: DType, depth: int) -> Known:
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        if min(one.trust, other.trust) is Trust.NEAR:
            # Of positive numbers: nothing cancels.
            parts = (apply(Prim.ABS, one.expr), apply(Prim.ABS, other.expr))
            return Known(apply(Prim.ADD, *parts), Trust.NEAR)
        prim = self.draw(st.sampled_from((Prim.ADD, Prim.SUB)))
        step, limit = min(one.step, other.step), one.limit + other.limit
        return on_grid(apply(prim, one.expr, other.expr), limit, step, min(one.trust, other.trust))

    def product(self, dtype: DType, depth: int) -> Known:
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        trust = min(one.trust, other.trust)
        limit = one.limit * other.limit if one.step * other.step else 0.0
        return on_grid(apply(Prim.MUL, one.expr, other.expr), limit, one.step * other.step, trust)

    def quotient(self, dtype: DType, depth: int) -> Known:
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        divisor = other.expr
        if other.trust is not Trust.BITS:  # its zeros would turn a sign into infinity's
            divisor = apply(Prim.ADD, apply(Prim.ABS, divisor), const(1.0, dtype))
        return Known(apply(Prim.DIV, one.expr, divisor), min(one.trust, other.trust))

    def extremum(self, dtype: DType, depth: int) -> Known:
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        expr = apply(self.draw(st.sampled_from((Prim.MIN, Prim.MAX))), one.expr, other.expr)
        trust = min(one.trust, other.trust, Trust.VALUE)
        return on_grid(expr, max(one.limit, other.limit), min(one.step, other.step), trust)

    def unary(self, dtype: DType, depth: int) -> Known:
        made = self.make(dtype, depth)
        prim = self.draw(st.sampled_from((Prim.NEG, Prim.ABS, Prim.SQRT, *_CALM)))
        expr = apply(prim, made.expr)
        if prim in (Prim.NEG, Prim.ABS):
            return replace(made, expr=expr)
        return Known(expr, made.trust if prim is Prim.SQRT else Trust.NEAR)

    def conversion(self, dtype: DType, depth: int) -> Known:
        if self.draw(st.booleans()):
            source = self.draw(st.sampled_from((*INTEGERS, BOOL)))
            return Known(converted(self.make(source, depth).expr, dtype))
        made = self.make(F64 if dtype is F32 else F32, depth)
        return replace(made, expr=converted(made.expr, dtype))

    def exact_only(self, dtype: DType, depth: int) -> Known:
        """Operations that IEEE 754 settles, and that a small change of an argument would upset."""
        one = self.exact(dtype, depth)
        match self.draw(st.integers(0, 3)):
            case 0:
                expr = apply(self.draw(st.sampled_from(_ROUNDING)), one.expr)
                return on_grid(expr, one.limit + 1, 1.0 if one.step else 0.0, one.trust)
            case 1:
                other = self.exact(dtype, depth)
                return Known(apply(Prim.MOD, one.expr, other.expr), min(one.trust, other.trust))
            case 2:
                # The sign of a computed NaN is anyone's, so the sign comes from memory.
                return replace(one, expr=apply(Prim.COPYSIGN, one.expr, self.load(dtype).expr))
            case _:
                factors = (one, self.exact(dtype, depth), self.exact(dtype, depth))
                trust = min(factor.trust for factor in factors)
                return Known(apply(Prim.FMA, *(factor.expr for factor in factors)), trust)

    def function(self, dtype: DType, depth: int) -> Known:
        match self.draw(st.integers(0, 9)):
            case 0:
                pair = [self.grid(dtype, depth).expr for _ in range(2)]
                prim = self.draw(st.sampled_from((Prim.ATAN2, Prim.HYPOT)))
                return Known(apply(prim, *pair), Trust.NEAR)
            case 1:
                power = self.draw(st.sampled_from((2.0, 0.5, -1.0, 3.0, 0.0, -2.5)))
                base = self.grid(dtype, depth).expr
                return Known(apply(Prim.POW, base, const(power, dtype)), Trust.NEAR)
            case _:
                prim = self.draw(st.sampled_from(_FUNCTIONS))
                return Known(apply(prim, self.grid(dtype, depth).expr), Trust.NEAR)
