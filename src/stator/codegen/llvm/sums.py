"""How exact sums are: the types that they are kept in, and how many terms one may take in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stator.codegen.llvm.shape import widest
from stator.core.dtypes import DType
from stator.loops.index import Axis
from stator.loops.ir import Accumulate, Combine, Stage

SHORT: Final = 256  # terms of a sum that costs hardly more in f64

# Whether any or all are true is kept in numbers as wide as the others of the loop: there are
# registers for vectors of those on every processor, and for vectors of bits on few.
_FLAGS: Final = {1: DType.U8, 2: DType.I16, 4: DType.I32, 8: DType.I64}


def total_type(statement: Accumulate, stage: Stage) -> DType:
    """The type of a total: f64 for sums of f32, whose parts are added one by one."""
    dtype = statement.value.dtype
    if statement.combine in (Combine.ANY, Combine.ALL):
        return _FLAGS[widest(stage.body)]
    # Eager's running sums and products are of f64 as well.
    widens = statement.combine is Combine.SUM or (
        statement.combine is Combine.PROD and stage.in_order
    )
    return DType.F64 if widens and dtype is DType.F32 else dtype


def part_type(statement: Accumulate, stage: Stage) -> DType:
    """The type in which terms are added: the total's, but for f32 where there are many.

    Of an unknown number: such a sum may be short, and then parts of f32 would cost more digits
    than eager loses.
    """
    are_many = count_of(stage.inner) is not None and not has_few_terms(stage)
    is_float = statement.value.dtype.is_float
    return statement.value.dtype if are_many and is_float else total_type(statement, stage)


def is_direct(stage: Stage) -> bool:
    """Whether terms of a row go right into the total, and not into parts of it first.

    Of an unknown number, they do unless there are sums of f64, which nothing wider takes in.
    """
    if count_of(stage.inner) is not None:
        return has_few_terms(stage)
    sums = [s for s in stage.body if isinstance(s, Accumulate) and s.combine is Combine.SUM]
    return stage.in_order or all(s.value.dtype is not DType.F64 for s in sums)


def has_few_terms(stage: Stage) -> bool:
    """Whether there are few enough terms to be added one by one."""
    count = count_of(stage.inner)
    return stage.in_order or (count is not None and count <= SHORT)


def count_of(axes: Sequence[Axis]) -> int | None:
    """How many points the axes have; None if it is not known."""
    total = 1
    for axis in axes:
        size = axis.size.constant
        if size is None:
            return None
        total *= size
    return total
