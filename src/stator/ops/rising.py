"""Functions of a number that never fall: the largest number gives the largest value."""

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
    """An expression as a function of a number, with constants: `steps` behind each other.

    Constants are finite, so that no step makes a NaN; all of them keep one.
    """

    inner: Expr
    steps: tuple[tuple[Expr, Expr], ...]  # each with what it is applied to; the last one first

    @staticmethod
    def of(expr: Expr) -> Rising | None:
        """The function of an integer that gives `expr`; None if it is none, or may fall."""
        found = Rising.of_any(expr)
        return None if found is None or found.inner.dtype.is_float else found

    @staticmethod
    def of_any(expr: Expr) -> Rising | None:
        """The longest function that gives `expr`, of an integer or a float."""
        steps: list[tuple[Expr, Expr]] = []
        while expr.dtype.is_float and (operand := _operand(expr)) is not None:
            steps.append((expr, operand))
            expr = operand
        is_number = expr.dtype is not DType.BOOL and not isinstance(expr, Const)
        return Rising(expr, tuple(steps)) if steps and is_number else None

    def at(self, inner: Expr) -> Expr:
        """The function of another number."""
        for step, operand in reversed(self.steps):
            inner = _replaced(step, operand, inner)
        return inner


def _replaced(step: Expr, operand: Expr, inner: Expr) -> Expr:
    """The step, applied to another number."""
    if step is operand:
        return inner
    if isinstance(step, Cast):
        return Cast(step.dtype, _replaced(step.value, operand, inner))
    if isinstance(step, Apply):
        args = tuple(_replaced(arg, operand, inner) for arg in step.args)
        return Apply(step.dtype, step.prim, args)
    return step


def _operand(expr: Expr) -> Expr | None:
    """What a step that never falls is applied to."""
    if isinstance(expr, Cast):
        return expr.value
    if not isinstance(expr, Apply):
        return None
    if expr.prim in _ROUNDING:
        return expr.args[0]
    if expr.prim is Prim.WHERE:
        return _limited(*expr.args)
    if len(expr.args) != 2:
        return None
    first, second = expr.args
    if isinstance(second, Const):
        return first if _rises_by(expr.prim, float(second.value)) else None
    if isinstance(first, Const) and expr.prim not in (Prim.SUB, Prim.DIV):
        return second if _rises_by(expr.prim, float(first.value)) else None
    return None


def _limited(chosen: Expr, first: Expr, second: Expr) -> Expr | None:
    """What is limited to numbers from a constant on: where(x < c, c, x)."""
    is_limit = isinstance(chosen, Apply) and chosen.prim is Prim.LT
    if not is_limit or not isinstance(first, Const) or isnan(first.value):
        return None
    assert isinstance(chosen, Apply), "it is a comparison"
    return second if chosen.args == (second, first) else None


def _rises_by(prim: Prim, number: float) -> bool:
    """Whether a value that rises gives one that does not fall, with a constant beside it."""
    if prim in (Prim.MAX, Prim.MIN):
        return not isnan(number)
    if prim in (Prim.MUL, Prim.DIV):
        return number > 0 and isfinite(number)
    return prim in (Prim.ADD, Prim.SUB) and isfinite(number)
