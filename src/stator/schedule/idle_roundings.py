"""Roundings to half precision that change nothing, dropped.

before: y[i0] = to_bf16(mul(to_bf16(x[i0]), z[i0]))      x and y: bf16
after:  y[i0] = mul(x[i0], z[i0])                         loads are exact, stores round
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stator.core.dtypes import DType
from stator.loops.half import HALVES, is_exact
from stator.loops.ir import (
    Accumulate,
    Apply,
    Cast,
    Expr,
    Kernel,
    Stage,
    Statement,
    Store,
    Within,
    innermost_first,
)
from stator.loops.prims import Prim

_CHOOSING: Final = {Prim.NEG, Prim.ABS, Prim.MIN, Prim.MAX}  # they give what they are given


def without_idle_roundings(kernel: Kernel) -> Kernel:
    """The same kernel: last of all, when it is settled what is loaded and what stays a value."""
    dropper = _Dropper()
    stages = (Stage(s.inner, tuple(map(dropper.of, s.body)), s.in_order) for s in kernel.stages)
    return replace(kernel, stages=tuple(stages))


class _Dropper:
    """Shared parts are looked at once."""

    def __init__(self) -> None:
        self.done: dict[Expr, Expr] = {}
        self.held: dict[tuple[Expr, DType], bool] = {}

    def of(self, statement: Statement) -> Statement:
        """A statement without them."""
        value = self._plain(statement.value)
        if isinstance(statement, Accumulate):
            return Accumulate(statement.name, statement.combine, value)
        if isinstance(value, Apply) and HALVES.get(value.prim) is statement.buffer.dtype:
            (value,) = value.args if statement.combine is None else (value,)
        return Store(statement.buffer, statement.index, value, statement.combine)

    def _plain(self, expr: Expr) -> Expr:
        for part in innermost_first(expr, self.done.__contains__):
            self.done[part] = self._rebuilt(part)
        return self.done[expr]

    def _rebuilt(self, expr: Expr) -> Expr:
        match expr:
            case Apply():
                args = tuple(self.done[arg] for arg in expr.args)
                if expr.prim in HALVES and self._is_held(args[0], HALVES[expr.prim]):
                    return args[0]
                return Apply(expr.dtype, expr.prim, args)
            case Cast():
                return Cast(expr.dtype, self.done[expr.value])
            case Within():
                sides = (self.done[side] for side in expr.operands)
                return Within(expr.dtype, expr.index, expr.limit, *sides)
        return expr

    def _is_held(self, expr: Expr, dtype: DType) -> bool:
        """Whether half precision has the number."""
        found = self.held.get((expr, dtype))
        if found is None:
            found = self.held[expr, dtype] = self._looked_up(expr, dtype)
        return found

    def _looked_up(self, expr: Expr, dtype: DType) -> bool:
        match expr:
            case Apply(prim=Prim.WHERE, args=(_, *sides)):
                return all(self._is_held(side, dtype) for side in sides)
            case Apply(prim=prim) if prim in _CHOOSING:
                return all(self._is_held(arg, dtype) for arg in expr.args)
            case Within():
                return all(self._is_held(side, dtype) for side in expr.operands)
        return is_exact(expr, dtype)
