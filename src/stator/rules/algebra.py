"""Two steps of arithmetic that undo or repeat each other.

A right side that is the operand is written as a clone: its memory stays its own, and drop_noops,
which sees the whole graph, drops it where nobody can tell.

A rewrite of other compilers that is no equation, and so is not here: s*x - amax(s*x) --> s*(x -
amax(x)).  Products round before the subtraction on one side, after it on the other; s*x may
overflow to infinity, and the difference then is NaN, where x - amax(x) is finite; for |s| < 1 small
ones lose digits, even if s is a power of two.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stator.graph.rules import Rewrite, Rule, rule

aten = torch.ops.aten


@rule(example=lambda: (torch.tensor([1.5, -0.0, float("nan"), -float("inf")]),))
def neg_of_neg(x: Tensor) -> Rewrite:
    """-(-x)  -->  x"""
    return Rewrite(before=aten.neg.default(aten.neg.default(x)), after=aten.clone.default(x))


@rule(example=lambda: (torch.tensor([1.5, -0.0, float("nan"), -float("inf")]),))
def relu_of_relu(x: Tensor) -> Rewrite:
    """relu(relu(x))  -->  relu(x)"""
    return Rewrite(before=aten.relu.default(aten.relu.default(x)), after=aten.relu.default(x))


@rule(example=lambda: (torch.tensor([1.5, -0.0, float("nan"), -float("inf")]),))
def abs_of_abs(x: Tensor) -> Rewrite:
    """abs(abs(x))  -->  abs(x)"""
    return Rewrite(before=aten.abs.default(aten.abs.default(x)), after=aten.abs.default(x))


@rule(example=lambda: (torch.tensor([-128, -1, 0, 127], dtype=torch.int8),))
def abs_of_neg(x: Tensor) -> Rewrite:
    """abs(-x)  -->  abs(x)"""
    return Rewrite(before=aten.abs.default(aten.neg.default(x)), after=aten.abs.default(x))


def is_bool(x: Tensor) -> bool:
    """Whether x holds truth values."""
    return bool(x.dtype == torch.bool)


@rule(
    when=is_bool,
    example=lambda: (torch.tensor([True, False]),),
    rejects=[lambda: (torch.tensor([0.0, 2.0]),), lambda: (torch.tensor([0, 2]),)],  # 2 becomes 1
)
def not_of_not(x: Tensor) -> Rewrite:
    """not(not(x))  -->  x    for truth values"""
    inside = aten.logical_not.default(x)
    return Rewrite(before=aten.logical_not.default(inside), after=aten.clone.default(x))


@rule(example=lambda: (torch.tensor([-128, -1, 0, 127], dtype=torch.int8),))
def bitwise_not_of_not(x: Tensor) -> Rewrite:
    """~~x  -->  x"""
    inside = aten.bitwise_not.default(x)
    return Rewrite(before=aten.bitwise_not.default(inside), after=aten.clone.default(x))


def are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether both have one type: then no operand is widened after it was negated."""
    return bool(x.dtype == y.dtype)


@rule(
    when=are_alike,
    example=lambda: (torch.randn(2, 3), torch.tensor([-0.0, float("nan"), float("inf")])),
    rejects=[
        # 0 - 1 is 255 in eight bits without a sign, and -1 in more
        lambda: (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)),
        lambda: (torch.randn(2).bfloat16(), torch.randn(2)),
    ],
)
def sub_of_neg(x: Tensor, y: Tensor) -> Rewrite:
    """x - (-y)  -->  x + y"""
    return Rewrite(before=aten.sub.Tensor(x, aten.neg.default(y)), after=aten.add.Tensor(x, y))


@rule(
    when=are_alike,
    example=lambda: (torch.randn(2, 3), torch.tensor([-0.0, float("nan"), float("inf")])),
    rejects=[
        lambda: (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)),
        lambda: (torch.randn(2).bfloat16(), torch.randn(2)),
    ],
)
def add_of_neg(x: Tensor, y: Tensor) -> Rewrite:
    """x + (-y)  -->  x - y"""
    return Rewrite(before=aten.add.Tensor(x, aten.neg.default(y)), after=aten.sub.Tensor(x, y))


ALGEBRA: Final[tuple[Rule, ...]] = (
    neg_of_neg,
    relu_of_relu,
    abs_of_abs,
    abs_of_neg,
    not_of_not,
    bitwise_not_of_not,
    sub_of_neg,
    add_of_neg,
)
