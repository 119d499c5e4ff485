"""Sums of one term: the term alone, where and only where all others are zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.core.dtypes import DType
from stator.loops.build import Body, const
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Combine, Expr, IndexValue, Load
from stator.schedule.single_term import single_term

b = Body()
AXIS = Axis("r", Index.of(7))
COUNT = IndexValue(DType.I64, Index.of(AXIS))
TARGET = Load(DType.I64, Buffer("target", DType.I64, Index.of(1)), Index.of(0))
ROW = Load(DType.F32, Buffer("row", DType.F32, Index.of(7)), Index.of(AXIS))
TERM = Load(DType.F32, Buffer("term", DType.F32, Index.of(1)), Index.of(0))
ZERO = const(0, DType.F32)


def test_the_term_is_taken_where_the_target_is_in_range() -> None:
    valid = b.ne(TARGET, -100)
    value = b.where(b.and_(b.eq(TARGET, COUNT), valid), TERM, ZERO)

    found = single_term(Combine.SUM, value, (AXIS,))

    size = IndexValue(DType.I64, Index.of(7))
    in_range = b.and_(b.ge(TARGET, 0), b.lt(TARGET, size))
    assert found is b.where(b.and_(in_range, valid), TERM, ZERO)


@pytest.mark.parametrize(
    "value",
    [
        b.where(b.eq(TARGET, COUNT), ROW, ZERO),  # another term for every place
        b.where(b.eq(TARGET, COUNT), TERM, TERM),  # the others are not zero
        b.where(b.le(TARGET, COUNT), TERM, ZERO),  # several terms
        b.where(b.ne(TARGET, COUNT), TERM, ZERO),
        b.where(b.or_(b.eq(TARGET, COUNT), b.eq(TARGET, 3)), TERM, ZERO),
        b.where(b.eq(TARGET, IndexValue(DType.I64, Index.of(AXIS) * 2)), TERM, ZERO),
        b.where(b.and_(b.eq(TARGET, COUNT), b.lt(ROW, 0)), TERM, ZERO),  # a row's own condition
        TERM,
    ],
)
def test_all_else_stays_a_sum(value: Expr) -> None:
    assert single_term(Combine.SUM, value, (AXIS,)) is None


def test_the_largest_of_a_row_is_no_sum() -> None:
    value = b.where(b.eq(TARGET, COUNT), TERM, ZERO)

    assert single_term(Combine.MAX, value, (AXIS,)) is None
    assert single_term(Combine.SUM, value, (AXIS, Axis("q", Index.of(3)))) is None


@pytest.mark.parametrize("codegen", ["auto", "triton"])
def test_the_gradient_of_a_loss_is_right(codegen: str) -> None:
    if codegen == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    x = torch.randn(6, 11, requires_grad=True)
    target = torch.tensor([0, 10, -100, 3, 3, -100])

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, ignore_index=-100)

    options = {"codegen": codegen, "strict": True, "cache": False}
    compiled = torch.compile(loss, backend="stator", options=options)
    (actual,) = torch.autograd.grad(compiled(x, target), x)
    (exact,) = torch.autograd.grad(loss(x.double(), target), x)

    torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-7)


def test_a_row_that_is_counted_once_is_summed_exactly() -> None:
    target = torch.tensor([2, 5, -1, 7, 0])
    term = torch.tensor([1.5, -2.0, 3.0, 4.0, float("nan")])

    def summed(target: Tensor, term: Tensor) -> Tensor:
        count = torch.arange(7)
        return torch.where(count == target[:, None], term[:, None], 0.0).sum(-1)

    compiled = torch.compile(summed, backend="stator", options={"strict": True, "cache": False})

    torch.testing.assert_close(compiled(target, term), summed(target, term), equal_nan=True)
