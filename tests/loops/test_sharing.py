"""Expressions share their parts: what walks over one meets each part once, however deep."""

from __future__ import annotations

from unittest import mock

from stator.core.dtypes import DType
from stator.loops.build import apply
from stator.loops.index import Axis, Element, Index
from stator.loops.ir import Apply, Buffer, Expr, Load, loads_of, walk
from stator.loops.prims import Prim
from stator.schedule.rewrite import rewritten

ROW, OTHER = Axis("i", Index.of(8)), Axis("j", Index.of(8))
X = Buffer("x", DType.F32, Index.of(64))
LEVELS = 18  # of two uses each: 262,144 paths
DEEP = 5_000  # levels: Python's own stack holds a thousand calls


def doubled(levels: int) -> Expr:
    """x + x, that + that, ...: a part a level, and twice the paths."""
    value: Expr = Load(DType.F32, X, Index.of(ROW))
    for _ in range(levels):
        value = apply(Prim.ADD, value, value)
    return value


def test_axes_are_replaced_once_in_each_part() -> None:
    with mock.patch.object(Apply, "_replaced", autospec=True, side_effect=Apply._replaced) as one:
        moved = doubled(LEVELS).replaced({ROW: Index.of(OTHER)})

    assert one.call_count == LEVELS
    assert moved.axes == {OTHER}


def test_axes_are_replaced_once_in_an_index_that_stands_in_others() -> None:
    value = Load(DType.I64, Buffer("t", DType.I64, Index.of(8)), Index.of(ROW))
    for _ in range(LEVELS):
        twice = apply(Prim.ADD, value, value)
        value = Load(DType.I64, value.buffer, Index.of(Element(twice)) * 2 + Element(value))

    with mock.patch.object(Load, "_replaced", autospec=True, side_effect=Load._replaced) as one:
        value.replaced({ROW: Index.of(OTHER)})

    assert one.call_count == LEVELS + 1


def test_a_deep_expression_is_no_deep_recursion() -> None:
    value: Expr = Load(DType.F32, X, Index.of(ROW))
    for _ in range(DEEP):
        value = apply(Prim.SQRT, value)

    moved = value.replaced({ROW: Index.of(OTHER)})
    taken = rewritten(moved, lambda load, _: Load(DType.F32, X, Index.of(ROW)), {})

    assert taken is value
    assert moved.axes == {OTHER}
    assert len(list(walk(moved))) == DEEP + 1
    assert len(loads_of(moved)) == 1
