"""The builder that operators are written with: scalar expressions, constants folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stator.core.dtypes import DType
from stator.loops.ir import Apply, Cast, Const, Expr, result_dtype
from stator.loops.prims import Prim

Value: TypeAlias = Expr | int | float | bool


def const(value: int | float | bool, dtype: DType) -> Const:
    """A number in the given type."""
    if dtype.is_float:
        return Const(dtype, float(value))
    if dtype is DType.BOOL:
        return Const(dtype, bool(value))
    bits = 8 * dtype.bytes
    wrapped = int(value) & ((1 << bits) - 1)
    negative = dtype.is_signed and wrapped >> (bits - 1)
    return Const(dtype, wrapped - (1 << bits) if negative else wrapped)


def cast(value: Expr, dtype: DType) -> Expr:
    """`value` converted; no node where it has the type already."""
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and not (value.dtype.is_float and not dtype.is_float):
        return const(value.value, dtype)
    return Cast(dtype, value)


def apply(prim: Prim, *args: Value) -> Expr:
    """A primitive; Python numbers take the type of the other arguments."""
    typed = [arg for arg in args if isinstance(arg, Expr)]
    if not typed:
        raise TypeError(f"{prim.name} of numbers alone: {args}")
    kind = typed[-1].dtype
    exprs = tuple(arg if isinstance(arg, Expr) else const(arg, kind) for arg in args)
    return Apply(result_dtype(prim, exprs), prim, exprs)


class Body:
    """One method for each primitive, in lower case: `b.add(x, y)`, `b.where(c, x, y)`."""

    def cast(self, value: Expr, dtype: DType) -> Expr:
        """Conversion."""
        return cast(value, dtype)

    def const(self, value: int | float | bool, like: Expr) -> Expr:
        """A number in the type of `like`."""
        return const(value, like.dtype)

    def as_expr(self, value: Value, like: Expr) -> Expr:
        """`value`; if it is a number, in the type of `like`."""
        return value if isinstance(value, Expr) else const(value, like.dtype)

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        prim = Prim.__members__.get(name.rstrip("_").upper())
        if prim is None:
            raise AttributeError(f"no primitive {name!r}")
        return lambda *args: apply(prim, *args)

    def sigmoid(self, x: Expr) -> Expr:
        """1 / (1 + exp(-x))"""
        return apply(Prim.DIV, 1, apply(Prim.ADD, 1, apply(Prim.EXP, apply(Prim.NEG, x))))

    def square(self, x: Expr) -> Expr:
        """x * x"""
        return apply(Prim.MUL, x, x)

    def reciprocal(self, x: Expr) -> Expr:
        """1 / x"""
        return apply(Prim.DIV, 1, x)

    def rsqrt(self, x: Expr) -> Expr:
        """1 / sqrt(x)"""
        return apply(Prim.DIV, 1, apply(Prim.SQRT, x))
