"""Tensors from nothing, and copies: against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stator.core.dtypes import DType
from stator.loops.build import const
from stator.loops.index import Index
from stator.loops.values import Result, Value
from stator.lower.lower import Lowering
from stator.ops import make
from tests.ops.fused import FLOATS, TYPES, check_fused, sample

MADE: dict[str, Callable[[Tensor], Any]] = {
    "full": lambda x: (torch.full((2, 3), 1.5), torch.full((2,), 3), torch.full((), True)),
    "full_like": lambda x: (torch.full_like(x, 2), torch.ones_like(x), torch.zeros_like(x)),
    "new": lambda x: (x.new_full((2,), 3.0), x.new_zeros(2, 2), x.new_ones(3)),
    "empty": lambda x: (torch.empty_like(x).fill_(2), x.new_empty(3).copy_(x[0, :3])),
    "fill": lambda x: (x.clone().fill_(x[0, 0]), torch.empty(2, 3).fill_(7)),
    "eye": lambda x: (torch.eye(4), torch.eye(3, 5), torch.eye(5, 3, dtype=torch.int32)),
    "arange": lambda x: (torch.arange(5), torch.arange(2, 7), torch.arange(-1, 9, 3)),
    "arange down": lambda x: (torch.arange(5, -5, -2), torch.arange(5.0, -5, -1.5)),
    "arange of floats": lambda x: (torch.arange(0.5, 4), torch.arange(0, 1, 0.1)),
    "arange in bytes": lambda x: torch.arange(3, 9, dtype=torch.uint8) + x[0, 0].to(torch.uint8),
    "linspace": lambda x: (torch.linspace(0, 1, 7), torch.linspace(3, -2, 100)),
    "linspace of few": lambda x: (torch.linspace(2, 5, 1), torch.linspace(2, 5, 2)),
    "scalars": lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, x, torch.tensor(2.0))),
    "constants": lambda x: x[:, :3] + torch.tensor([1.0, 2.0, 3.0]),
    "masked_fill": lambda x: (x.masked_fill(x > 0, 1.5), x.masked_fill(x > 0, x[0, 0])),
}


@pytest.mark.parametrize("name", MADE)
def test_make(name: str) -> None:
    """Made on the way, and read."""

    def run(x: Tensor) -> Any:
        made = MADE[name](x)
        return [x[0, 0] + m for m in made] if isinstance(made, tuple) else made

    check_fused(run, sample(4, 5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ranges_of_floats(dtype: torch.dtype) -> None:
    """As exact as eager's in every type, at both ends."""

    def run(x: Tensor) -> Any:
        return (
            torch.arange(17, dtype=dtype),
            torch.arange(0.1, 30, 0.7, dtype=dtype),
            torch.linspace(-1.1, 2.3, 33, dtype=dtype),
            x + torch.arange(5, dtype=dtype),
        )

    check_fused(run, sample(5, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_in_types(dtype: torch.dtype) -> None:
    """A number takes the type that it stands in."""

    def run(x: Tensor) -> Any:
        return (
            torch.full((3,), 2, dtype=dtype),
            x.new_full((2,), 1),
            torch.eye(3, dtype=dtype),
            torch.where(x == 1, x, x.new_ones(())),
        )

    check_fused(run, sample(5, dtype=dtype))


def test_large_numbers() -> None:
    """Integers beyond what floats hold, and infinity."""

    def run(x: Tensor) -> Any:
        return (
            torch.arange(2**60, 2**60 + 4) + x,
            torch.full((2,), 2**62) + x[:2],
            torch.full((2,), float("inf")),
            torch.full((2,), float("nan")),
            torch.arange(2**24, 2**24 + 6, dtype=torch.float32),
        )

    check_fused(run, sample(4, dtype=torch.int64))


def test_one_hot() -> None:
    """What it traces to; the check of its values stays with torch."""
    classes = torch.tensor([[0, 2], [3, 1]])
    check_fused(lambda i: F.one_hot(i, 4) * 2, classes, stays=("_assert_async",))


def test_dynamic_sizes() -> None:
    """Sizes that are known when it runs."""

    def run(x: Tensor) -> Any:
        rows = x.shape[0]
        return (
            x + torch.arange(rows)[:, None],
            torch.full((rows,), 2.0) * x[:, 0],
            torch.eye(rows) + x[:, :1],
            x.new_full((2,), rows),
            torch.arange(1, rows + 1) * 2,
        )

    check_fused(run, sample(5, 6), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_conversion_rounds_where_nobody_stores_it(dtype: torch.dtype) -> None:
    def lost(x: Tensor) -> Any:
        half = x.to(dtype)
        product = half.float() * half.float() - (half * half).float()
        joined = half.float() * half.float() - torch.cat([half * half, x])[:40]
        return x - half.float(), x - torch.empty_like(half).copy_(x), product, joined

    x = torch.randn(40, 30)
    found = torch.compile(lost, backend="stator", options={"strict": True})(x)

    assert all(map(torch.equal, found, lost(x)))


PINNED: dict[str, Callable[..., Any]] = {
    **{name: getattr(make, name) for name in ("zeros", "ones", "empty", "eye", "to_copy")},
    "full": lambda t, result, **options: make.full(t, result, [3], 1, **options),
    "full_like": lambda t, result, **options: make.full_like(t, result, None, 1, **options),
    "new_full": lambda t, result, **options: make.new_full(t, result, None, [3], 1, **options),
    "scalar_tensor": lambda t, result, **options: make.scalar_tensor(t, result, 1, **options),
    "arange": lambda t, result, **options: make.arange_to(t, result, 3, **options),
    "linspace": lambda t, result, **options: make.linspace(t, result, 0, 1, 3, **options),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_memory_is_torchs_to_make(name: str) -> None:
    builder = Lowering(torch.fx.GraphModule({}, torch.fx.Graph()))
    result = Result((Index.of(3), Index.of(3)), DType.F32)
    x = [Value(result.size, DType.F32, lambda _: const(1.0, DType.F32))] * (name == "to_copy")

    assert PINNED[name](builder, result, *x, pin_memory=True) is None
    assert PINNED[name](builder, result, *x, pin_memory=False, device="cuda") is not None
