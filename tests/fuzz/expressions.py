"""Random scalar expressions, built so that two right implementations agree on them.

A backend may reassociate float sums and has 2 ulp of freedom in functions such as exp.  So every
float carries how far it can be trusted, and nothing that would blow a small difference up (a
comparison, a rounding, a difference of near numbers) is applied to one that is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from stator.core.dtypes import DType
from stator.loops.build import apply, const
from stator.loops.index import Axis, Element, Index, Symbol
from stator.loops.ir import Buffer, Cast, Expr, IndexValue, Load, Within
from stator.loops.prims import Prim
from stator.loops.verify import argument_count
from tests.fuzz.accesses import Places, Range, loaded_index
from tests.fuzz.choices import Choices

F32, F64, I64, BOOL = DType.F32, DType.F64, DType.I64, DType.BOOL
INTEGERS: Final = (DType.I64, DType.I32, DType.U8, DType.I16, DType.I8)
# Floats more often than the rest: they have the most primitives.
ARITHMETIC: Final = (F32, F32, F32, F64, F64, BOOL, *INTEGERS)
HALVES: Final = (DType.BF16, DType.F16)
STEP: Final = 0.25  # floats in memory are multiples of this …
LIMIT: Final = 8.0  # … up to this, apart from NaN and infinities

_NUMBERS: Final = (0.0, 1.0, -1.5, 0.25, 3.0, -0.0, float("inf"), float("-inf"))
_PLACES: Final = (I64, I64, DType.I32, DType.U8)  # types in which indices are computed
SHIFT: Final = Index.of(Symbol("n0", is_signed=True))  # a number that may be negative
_RANDOM: Final = (Prim.THREEFRY_0, Prim.THREEFRY_1, Prim.THREEFRY_ONE, Prim.PHILOX_ONE)
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


@dataclass(frozen=True, slots=True)
class Choice:
    """What a choice by an index asks, and what it may load where the answer is yes."""

    index: Index
    limit: Index
    load: Known


@dataclass
class Expressions:
    """Makes expressions for the statements of one stage."""

    choices: Choices
    axes: Sequence[Axis]
    fresh: Callable[[str], str]
    known: list[Known] = field(default_factory=list)  # made before and still in scope
    asked: list[Choice] = field(default_factory=list)  # choices made before
    places: Places = loaded_index  # how elements lie that are loaded
    may_choose: bool = True  # whether choices by an index are made
    is_enough: Callable[[], bool] = lambda: False  # whether the kernel is large already

    def make(self, dtype: DType, depth: int) -> Known:
        """An expression of a type that arithmetic uses."""
        kind = 0 if depth <= 0 or self.is_enough() else self.choices.below(8)
        if kind <= 1:
            found = self.leaf(dtype)
        elif kind == 2 and self.axes and self.may_choose:
            found = self.within(dtype, depth - 1)
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
        kind = self.choices.below(9)
        if 2 <= kind <= 4 and again:
            return self.choices.one_of(again[-6:])
        if kind == 5:
            return self.constant(dtype)
        if kind == 6 and dtype is not BOOL:
            place = SHIFT if self.choices.chance(6) else loaded_index(self.choices, self.axes)[0]
            return Known(IndexValue(dtype, place))
        return self.gather(dtype) if kind == 7 and self.axes else self.load(dtype)

    def constant(self, dtype: DType) -> Known:
        if dtype is BOOL:
            return Known(const(self.choices.chance(2), dtype))
        if not dtype.is_float:
            sign = -1 if dtype.is_signed and self.choices.chance(2) else 1
            return Known(const(sign * self.choices.below(9), dtype))
        number = self.choices.one_of(_NUMBERS)
        limit = abs(number) if abs(number) < LIMIT else 0.0
        return on_grid(const(number, dtype), limit, STEP, Trust.BITS)

    def load(self, dtype: DType) -> Known:
        index, length = self.places(self.choices, self.axes)
        return self.loaded(dtype, "x", length, index)

    def loaded(self, dtype: DType, hint: str, length: Index, index: Index) -> Known:
        """A load from a buffer of its own."""
        stored = self.choices.one_of((F32, F32, *HALVES)) if dtype is F32 else dtype
        expr = Load(dtype, Buffer(self.fresh(hint), stored, length), index)
        return on_grid(expr, LIMIT, STEP, Trust.BITS) if dtype.is_float else Known(expr)

    # --- computed places ---

    def gather(self, dtype: DType) -> Known:
        """A load whose row the program computes."""
        row, rows = self.place()
        column, width = loaded_index(self.choices, self.axes[-1:])
        return self.loaded(dtype, "table", width * rows, width * row + column)

    def place(self) -> Range:
        """An integer that the program computes, put into bounds; negative ones from the end."""
        kind = self.choices.one_of(_PLACES)
        rows = Index.of(self.choices.between(1, 9))
        if self.axes and self.choices.chance(4):
            rows = self.choices.one_of(self.axes).size + 1
        row = self.make(kind, 1).expr if self.choices.chance(3) else self.load(kind).expr
        if kind.is_signed and self.choices.chance(2):
            behind = apply(Prim.ADD, row, _number(rows, kind))
            row = apply(Prim.WHERE, apply(Prim.LT, row, const(0, kind)), behind, row)
        row = apply(Prim.MAX, apply(Prim.MIN, row, _number(rows - 1, kind)), const(0, kind))
        return Index.of(Element(row)), rows

    # --- choices by an index ---

    def within(self, dtype: DType, depth: int) -> Known:
        """One expression where an index is in bounds, which loads there, another elsewhere."""
        again = [choice for choice in self.asked if choice.load.dtype is dtype]
        use_again = bool(again) and self.choices.chance(2)
        choice = self.choices.one_of(again) if use_again else self.ask(dtype)
        self.asked.append(choice)
        before = len(self.known)
        self.known.append(choice.load)
        inside = choice.load if self.choices.chance(2) else self.make(dtype, depth)
        del self.known[before:]  # it may hold the load, which is in bounds there alone
        outside = self.make(dtype, depth)
        expr = Within(dtype, choice.index, choice.limit, inside.expr, outside.expr)
        return _either(expr, inside, outside)

    def ask(self, dtype: DType) -> Choice:
        axis = self.choices.one_of(self.axes)
        step = self.choices.one_of((1, 1, 2, -1, 3))
        offset = self.choices.one_of((0, -1, 1, -2, 2, -4, 4, 7))
        index = step * Index.of(axis) + offset
        if self.choices.chance(3):
            others = [Index.of(other) for other in self.axes]
            index = index + self.choices.one_of([*others, SHIFT])
        limit = axis.size
        if not self.choices.chance(3):
            limit = Index.of(self.choices.between(1, 12))
        column, width = Index.of(0), Index.of(1)
        if self.choices.chance(2):
            column, width = self.places(self.choices, self.axes)
        load = self.loaded(dtype, "part", limit * width, index * width + column)
        return Choice(index, limit, load)

    # --- bool and integers: exact, whatever is done ---

    def boolean(self, depth: int) -> Known:
        match self.choices.below(5):
            case 0:
                prim = self.choices.one_of((Prim.AND, Prim.OR, Prim.XOR))
                return Known(apply(prim, *(self.make(BOOL, depth).expr for _ in range(2))))
            case 1:
                return Known(apply(Prim.NOT, self.make(BOOL, depth).expr))
            case 2:
                dtype = self.choices.one_of((F32, F64))
                return Known(apply(Prim.IS_NAN, self.exact(dtype, depth).expr))
            case 3:
                dtype = self.choices.one_of(ARITHMETIC)
                return Known(converted(self.exact(dtype, depth).expr, BOOL))
            case _:
                dtype = self.choices.one_of(ARITHMETIC)
                prim = self.choices.one_of(_COMPARISONS)
                return Known(apply(prim, *(self.exact(dtype, depth).expr for _ in range(2))))

    def integer(self, dtype: DType, depth: int) -> Known:
        match self.choices.below(8):
            case 7 if dtype is DType.I32:
                prim = self.choices.one_of(_RANDOM)
                words = [self.make(dtype, depth).expr for _ in range(argument_count(prim))]
                return Known(apply(prim, *words))
            case 0:
                prim = self.choices.one_of(_INTEGER_UNARY)
                return Known(apply(prim, self.make(dtype, depth).expr))
            case 1:
                return self.chosen(dtype, depth)
            case 2:
                source = self.choices.one_of((*INTEGERS, BOOL))
                return Known(converted(self.make(source, depth).expr, dtype))
            case 3:
                value = self.exact(self.choices.one_of((F32, F64)), depth).expr
                # What does not fit (NaN too) is left out: no result of converting it is right.
                is_small = apply(Prim.LE, apply(Prim.ABS, value), const(100.0, value.dtype))
                return Known(converted(apply(Prim.WHERE, is_small, value, 0.0), dtype))
            case _:
                prim = self.choices.one_of(_INTEGER_BINARY)
                return Known(apply(prim, *(self.make(dtype, depth).expr for _ in range(2))))

    def chosen(self, dtype: DType, depth: int) -> Known:
        condition = self.make(BOOL, depth).expr
        one, other = self.make(dtype, depth), self.make(dtype, depth)
        return _either(apply(Prim.WHERE, condition, one.expr, other.expr), one, other)

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
        match self.choices.below(11):
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
        prim = self.choices.one_of((Prim.ADD, Prim.SUB))
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
        expr = apply(self.choices.one_of((Prim.MIN, Prim.MAX)), one.expr, other.expr)
        trust = min(one.trust, other.trust, Trust.VALUE)
        return on_grid(expr, max(one.limit, other.limit), min(one.step, other.step), trust)

    def unary(self, dtype: DType, depth: int) -> Known:
        made = self.make(dtype, depth)
        prim = self.choices.one_of((Prim.NEG, Prim.ABS, Prim.SQRT, *_CALM))
        expr = apply(prim, made.expr)
        if prim in (Prim.NEG, Prim.ABS):
            return replace(made, expr=expr)
        return Known(expr, made.trust if prim is Prim.SQRT else Trust.NEAR)

    def conversion(self, dtype: DType, depth: int) -> Known:
        if self.choices.chance(2):
            source = self.choices.one_of((*INTEGERS, BOOL))
            return Known(converted(self.make(source, depth).expr, dtype))
        made = self.make(F64 if dtype is F32 else F32, depth)
        return replace(made, expr=converted(made.expr, dtype))

    def exact_only(self, dtype: DType, depth: int) -> Known:
        """Operations that IEEE 754 settles, and that a small change of an argument would upset."""
        one = self.exact(dtype, depth)
        match self.choices.below(4):
            case 0:
                expr = apply(self.choices.one_of(_ROUNDING), one.expr)
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
        match self.choices.below(10):
            case 0:
                pair = [self.grid(dtype, depth).expr for _ in range(2)]
                prim = self.choices.one_of((Prim.ATAN2, Prim.HYPOT))
                return Known(apply(prim, *pair), Trust.NEAR)
            case 1:
                power = self.choices.one_of((2.0, 0.5, -1.0, 3.0, 0.0, -2.5))
                base = self.grid(dtype, depth).expr
                return Known(apply(Prim.POW, base, const(power, dtype)), Trust.NEAR)
            case _:
                prim = self.choices.one_of(_FUNCTIONS)
                return Known(apply(prim, self.grid(dtype, depth).expr), Trust.NEAR)


def _either(expr: Expr, one: Known, other: Known) -> Known:
    """What is known of an expression that is one of two."""
    step, limit = min(one.step, other.step), max(one.limit, other.limit)
    return on_grid(expr, limit, step, min(one.trust, other.trust))


def _number(index: Index, dtype: DType) -> Expr:
    """A size as an expression."""
    number = index.constant
    return IndexValue(dtype, index) if number is None else const(number, dtype)
