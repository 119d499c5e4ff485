"""Functions of an integer that never fall: the largest integer gives the largest value."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from typing import Final

from stator.core.dtypes import DType
from stator.loops.ir import Apply, Cast, Const, Expr
from stator.loops.prims import Prim

# Rounding never exchanges two numbers, so neither do these.
_ROUNDING: Final = (Prim.ROUND, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.TO_F16, Prim.TO_BF16)


@dataclass(frozen=True, slots=True)
class Rising:
    """An expression as a function of an integer, with constants: `steps` behind each other.

    Integers are no NaN, and constants are finite, so that no step makes one.
    """

    inner: Expr
    steps: tuple[tuple[Expr, Expr], ...]  # each with what it is applied to; the last one first

    @staticmethod
    def of(expr: Expr) -> Rising | None:
        """The function that gives `expr`; None if it may fall, or is one of no integer."""
        steps: list[tuple[Expr, Expr]] = []
        while expr.dtype.is_float:
            operand = _operand(expr)
            if operand is None:
                return None
            steps.append((expr, operand))
            expr = operand
        is_number = expr.dtype is not DType.BOOL and not isinstance(expr, Const)
        return Rising(expr, tuple(steps)) if steps and is_number else None

    def at(self, inner: Expr) -> Expr:
        """The function of another integer."""
        for step, operand in reversed(self.steps):
            if isinstance(step, Cast):
                inner = Cast(step.dtype, inner)
            else:
                assert isinstance(step, Apply), "a step is a cast, or applies a primitive"
                args = tuple(inner if arg is operand else arg for arg in step.args)
                inner = Apply(step.dtype, step.prim, args)
        return inner


def _operand(expr: Expr) -> Expr | None:
    """What a step that never falls is applied to."""
    if isinstance(expr, Cast):
        return expr.value
    if not isinstance(expr, Apply):
        return None
    if expr.prim in _ROUNDING:
        return expr.args[0]
    if len(expr.args) != 2:
        return None
    first, second = expr.args
    if isinstance(second, Const):
        return first if _rises_by(expr.prim, float(second.value)) else None
    if isinstance(first, Const) and expr.prim not in (Prim.SUB, Prim.DIV):
        return second if _rises_by(expr.prim, float(first.value)) else None
    return None


def _rises_by(prim: Prim, number: float) -> bool:
    """Whether a value that rises gives one that does not fall, with a constant beside it."""
    if prim in (Prim.MAX, Prim.MIN):
        return not isnan(number)
    if prim in (Prim.MUL, Prim.DIV):
        return number > 0 and isfinite(number)
    return prim in (Prim.ADD, Prim.SUB) and isfinite(number)
