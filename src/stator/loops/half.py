"""Half precision: computed with in f32, and rounded where its values are looked at.

What arithmetic gives stays unrounded from one operator to the next, which is nearer to the truth
than eager.  What is converted to half precision, leaves it, or is compared is what memory holds.
"""

from __future__ import annotations

from typing import Final

import torch

from stator.core.dtypes import DType
from stator.loops.build import apply, cast, const
from stator.loops.ir import Apply, Cast, Const, Expr, Load
from stator.loops.prims import Prim
from stator.loops.values import Value

TO_HALF: Final = {DType.F16: Prim.TO_F16, DType.BF16: Prim.TO_BF16}
HALVES: Final = {prim: dtype for dtype, prim in TO_HALF.items()}
_TORCH_HALVES: Final = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
_NARROW: Final = (DType.BOOL, DType.U8, DType.I8)  # both types have all of their numbers


def rounded(expr: Expr, dtype: DType) -> Expr:
    """A value as an element of that type would be; only half precision holds less than it."""
    if dtype not in TO_HALF:
        return expr
    if isinstance(expr, Const):
        return const(torch.tensor(expr.value, dtype=_TORCH_HALVES[dtype]).item(), expr.dtype)
    # A load is rounded too: what was made in the same kernel may take its place.
    needless = is_exact(expr, dtype) and not isinstance(expr, Load)
    return expr if needless else apply(TO_HALF[dtype], expr)


def as_held(x: Value) -> Value:
    """`x` as memory would hold it."""
    return Value(x.size, x.dtype, lambda point: rounded(x.load(point), x.dtype))


def converted(x: Value, dtype: DType) -> Value:
    """`x` in another type: halves are rounded before and after."""
    if x.dtype is dtype:
        return x
    held, kind = as_held(x), dtype.computed_in
    return as_held(Value(x.size, dtype, lambda point: cast(held.load(point), kind)))


def is_exact(expr: Expr, dtype: DType) -> bool:
    """Whether half precision has the number, as far as one look tells."""
    match expr:
        case Load():
            return expr.buffer.dtype is dtype
        case Cast():
            return expr.value.dtype in _NARROW
        case Const():
            return rounded(expr, dtype) is expr
        case Apply():
            return expr.prim is TO_HALF[dtype]
    return False
