"""Functions of an integer that never fall: which are, and that they are kept whole."""

from __future__ import annotations

import pytest

from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Expr, Load
from stator.ops.rising import Rising

b = Body()
PLACE = Index.of(Axis("i0", Index.of(8)))
BYTE = Load(DType.U8, Buffer("x", DType.U8, Index.of(8)), PLACE)
OTHER = Load(DType.U8, Buffer("y", DType.U8, Index.of(8)), PLACE)
FLOAT = Load(DType.F32, Buffer("z", DType.F32, Index.of(8)), PLACE)
REAL = cast(BYTE, DType.F32)


@pytest.mark.parametrize(
    "expr",
    [
        REAL,
        cast(REAL, DType.F64),
        b.mul(b.sub(REAL, 3.0), 0.1),
        b.mul(const(0.1, DType.F32), REAL),
        b.add(const(-2.0, DType.F32), REAL),
        b.div(REAL, 7.0),
        b.min(b.max(b.round(REAL), 0.0), float("inf")),
        b.to_bf16(REAL),
        b.where(b.lt(REAL, 3.0), 3.0, REAL),
        b.mul(b.where(b.lt(b.add(REAL, 1.0), 3.0), 3.0, b.add(REAL, 1.0)), 2.0),
    ],
    ids=str,
)
def test_rises(expr: Expr) -> None:
    found = Rising.of(expr)
    assert found is not None
    assert found.inner is BYTE
    assert found.at(BYTE) is expr
    assert OTHER in _leaves(found.at(OTHER))
    assert BYTE not in _leaves(found.at(OTHER))


@pytest.mark.parametrize(
    "expr",
    [
        BYTE,  # no function at all
        FLOAT,
        b.mul(FLOAT, 2.0),  # NaN
        b.neg(REAL),
        b.mul(REAL, -1.0),
        b.mul(REAL, 0.0),
        b.mul(REAL, float("inf")),  # 0 * inf
        b.add(REAL, float("nan")),
        b.max(REAL, float("nan")),
        b.sub(const(1.0, DType.F32), REAL),
        b.div(const(1.0, DType.F32), REAL),
        b.add(REAL, cast(OTHER, DType.F32)),  # of two
        b.abs(b.sub(REAL, 3.0)),
        b.where(b.lt(REAL, 3.0), REAL, 0.0),
        cast(b.lt(BYTE, 3), DType.F32),  # a truth value has no least number to pad with
        const(1.0, DType.F32),
    ],
    ids=str,
)
def test_may_fall(expr: Expr) -> None:
    assert Rising.of(expr) is None


def test_functions_of_floats_keep_nan_and_are_told_apart() -> None:
    relu = b.where(b.lt(FLOAT, 0.0), 0.0, FLOAT)
    found = Rising.of_any(b.mul(relu, 2.0))
    assert found is not None
    assert found.inner is FLOAT
    assert found.at(FLOAT) is b.mul(relu, 2.0)
    assert Rising.of_any(FLOAT) is None
    assert Rising.of_any(b.where(b.lt(FLOAT, 0.0), 1.0, FLOAT)) is None
    assert Rising.of_any(b.where(b.gt(FLOAT, 0.0), 0.0, FLOAT)) is None
    exp = b.exp(FLOAT)  # its kernel is not known never to fall
    up_to_there = Rising.of_any(b.mul(exp, 2.0))
    assert up_to_there is not None
    assert up_to_there.inner is exp


def _leaves(expr: Expr) -> set[Expr]:
    operands = expr.operands
    return {expr} if not operands else set().union(*map(_leaves, operands))
