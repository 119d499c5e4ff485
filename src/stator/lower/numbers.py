"""Numbers that a call computes, as scalars of loops: Dynamo's symbolic floats.

Python raises where a division or a power has no result, and loops do not: where what is known of
sizes does not rule that out, it is asked before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from stator.core.dtypes import DType
from stator.loops.build import apply, cast, const
from stator.loops.index import Index
from stator.loops.ir import Expr, IndexValue
from stator.loops.prims import Prim
from stator.loops.values import Value
from stator.torch_api import is_positive

aten = torch.ops.aten

LARGEST_POWER: Final = 8  # of numbers below 2**64: still a finite float


@dataclass(frozen=True, slots=True)
class Number:
    """A float that is known when a call is made, computed in f64 as Python does."""

    expr: Expr


_ARITHMETIC: Final[Mapping[Any, Prim]] = {
    operator.add: Prim.ADD,
    operator.sub: Prim.SUB,
    operator.mul: Prim.MUL,
    operator.neg: Prim.NEG,
}


# What must hold at run time, or else raises.
Require: TypeAlias = Callable[[Expr, type[Exception], str], None]


def number_of(node: fx.Node, values: Mapping[fx.Node, Any], require: Require) -> Number | None:
    """The number that a node of a symbolic float computes; None where loops do not take it."""
    if not isinstance(node.meta.get("val"), torch.SymFloat) or node.kwargs:
        return None
    if node.target is aten._local_scalar_dense.default:
        return _element(values.get(node.args[0]))
    args = [_as_float(arg, values) for arg in node.args]
    known = [arg for arg in args if arg is not None]
    if len(known) != len(args):
        return None
    if node.target is torch.sym_float:
        return Number(known[0])
    if node.target in _ARITHMETIC:
        return Number(apply(_ARITHMETIC[node.target], *known))
    guarded = _GUARDED.get(node.target)
    return guarded(node, known, require) if guarded is not None else None


def _element(tensor: Any) -> Number | None:
    """The only element of a tensor."""
    if not isinstance(tensor, Value) or tensor.rank or not tensor.dtype.is_float:
        return None
    return Number(cast(tensor.load(()), DType.F64))


def _as_float(arg: Any, values: Mapping[fx.Node, Any]) -> Expr | None:
    value = values.get(arg) if isinstance(arg, fx.Node) else arg
    if isinstance(value, Number):
        return value.expr
    if isinstance(value, Index):
        return cast(IndexValue(DType.I64, value), DType.F64)
    return const(value, DType.F64) if isinstance(value, int | float) else None


def _divided(node: fx.Node, args: list[Expr], require: Require) -> Number | None:
    if not _is_above_zero(node.args[1]):
        holds = apply(Prim.NE, args[1], const(0, DType.F64))
        require(holds, ZeroDivisionError, "float division by zero")
    return Number(apply(Prim.DIV, *args))


def _power(node: fx.Node, args: list[Expr], require: Require) -> Number | None:
    base, exponent = node.args
    # A whole base is below 2**64, so that its power cannot overflow.
    whole = isinstance(base, fx.Node) and base.target is torch.sym_float
    if not whole or not isinstance(exponent, int | float) or abs(exponent) > LARGEST_POWER:
        return None
    # A guard of Dynamo's keeps it from being negative.
    if exponent < 0 and not _is_above_zero(base):
        holds = apply(Prim.NE, args[0], const(0, DType.F64))
        require(holds, ZeroDivisionError, "0.0 cannot be raised to a negative power")
    return Number(apply(Prim.POW, *args))


def _is_above_zero(arg: Any) -> bool:
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return is_positive(value)
    return isinstance(value, int | float) and value > 0


_GUARDED: Final[Mapping[Any, Callable[[fx.Node, list[Expr], Require], Number | None]]] = {
    operator.truediv: _divided,
    operator.pow: _power,
}
