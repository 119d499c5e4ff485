"""Products with weights of int8: when, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stator.passes.freezing.int8_weight_only import int8_weight_only
from tests.passes.freezing.graphs import rewritten, run_with_constants
from tests.passes.freezing.integers import called, integers


def cast_last(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.mm(x, w.t().to(x.dtype)) * s


def cast_first(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return s * torch.mm(x, w.to(x.dtype).t())


def of_three(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.mm(x, w.t().to(x.dtype)).view(2, -1, w.size(0)) * s.view(1, -1) + 1


@pytest.mark.parametrize("fn", [cast_last, cast_first, of_three])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 8, 34])
@pytest.mark.parametrize("width", [3, 48])
def test_weights_are_read_as_they_are(
    fn: Callable[..., Tensor], dtype: torch.dtype, rows: int, width: int
) -> None:
    x, w = torch.randn(rows, 96).to(dtype), integers(torch.int8, width, 96)
    s = (torch.rand(width) * 0.01).to(dtype)
    module, ctx = rewritten(fn, (x, w, s), (1, 2), int8_weight_only)
    assert "aten._weight_int8pack_mm.default" in called(module)
    assert "aten.mm.default" not in called(module)
    assert "reads its weight as int8" in ctx.record.notes[0]

    (found, *_), _ = run_with_constants(module, (x, w, s))
    expected = fn(x.double(), w, s.double())
    assert found.dtype == dtype
    assert (found - expected).abs().max() <= 0.01 * expected.abs().max()


def unscaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.mm(x, w.t().to(x.dtype)) + s


def scaled_by_rows(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.mm(x, w.t().to(x.dtype)) * s[:4].unsqueeze(1)


def read_twice(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y = torch.mm(x, w.t().to(x.dtype))
    return y * s + y


@pytest.mark.parametrize(
    ("fn", "dtype", "depth", "reason"),
    [
        (unscaled, torch.bfloat16, 64, "nothing multiplies it"),
        (read_twice, torch.bfloat16, 64, "nothing multiplies it"),
        (scaled_by_rows, torch.bfloat16, 64, "no number for each channel"),
        (cast_last, torch.float32, 64, "not of half precision"),
        (cast_last, torch.bfloat16, 40, "no multiple of 32"),
    ],
)
def test_what_is_not_says_why(
    fn: Callable[..., Tensor], dtype: torch.dtype, depth: int, reason: str
) -> None:
    x, w = torch.randn(4, depth).to(dtype), integers(torch.int8, 16, depth)
    module, ctx = rewritten(fn, (x, w, torch.rand(16).to(dtype)), (1, 2), int8_weight_only)
    assert "aten.mm.default" in called(module)
    assert reason in ctx.record.notes[0]


def test_other_products_are_none_of_its_business() -> None:
    module, ctx = rewritten(
        lambda x, w: torch.mm(x, w.t()),
        (torch.randn(4, 64), torch.randn(8, 64)),
        (1,),
        int8_weight_only,
    )
    assert not ctx.record.notes
    assert "aten.mm.default" in called(module)
