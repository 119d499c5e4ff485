"""Values rounded to half precision."""

from __future__ import annotations

import pytest
import torch

from stator.core.dtypes import DType
from stator.loops.build import apply, cast, const
from stator.loops.half import rounded
from stator.loops.index import Index
from stator.loops.ir import Buffer, Const, Load
from stator.loops.prims import Prim

ONE = Index.of(1)


def loaded(dtype: DType) -> Load:
    return Load(dtype.computed_in, Buffer("x", dtype, ONE), Index.of(0))


@pytest.mark.parametrize(
    ("half", "dtype"), [(DType.F16, torch.float16), (DType.BF16, torch.bfloat16)]
)
def test_numbers_are_rounded_at_once(half: DType, dtype: torch.dtype) -> None:
    number = rounded(const(0.1, DType.F32), half)

    assert isinstance(number, Const)
    assert number.value == torch.tensor(0.1, dtype=dtype).item()


def test_a_load_is_rounded_as_well() -> None:
    """What was made in the same kernel may take its place."""
    x = loaded(DType.BF16)

    assert rounded(x, DType.BF16) is apply(Prim.TO_BF16, x)
    assert rounded(apply(Prim.TO_BF16, x), DType.BF16) is apply(Prim.TO_BF16, x)
    assert rounded(x, DType.F16) is apply(Prim.TO_F16, x)


def test_what_has_no_more_digits_is_left_alone() -> None:
    flag = cast(loaded(DType.BOOL), DType.F32)

    assert rounded(flag, DType.F16) is flag
    assert rounded(loaded(DType.F32), DType.F32) is loaded(DType.F32)
