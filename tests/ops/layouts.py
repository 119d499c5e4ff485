"""Tensors that reductions have to read: every layout, and values that formulas trip over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

# Dimensions that reductions of a tensor of three take; each with and without keepdim.
DIMS: Final = ([-1], [0], [1], [0, 2], [-2, -1], [0, 1, 2])


def plain(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values, of many sizes in floats and of a small range in integers."""
    if dtype is torch.bool:
        return torch.randint(0, 4, size) > 0
    if not dtype.is_floating_point:
        low = 0 if dtype is torch.uint8 else -9
        return torch.randint(low, 10, size).to(dtype)
    return torch.randn(size, dtype=torch.float64).to(dtype)


LAYOUTS: Final[dict[str, Callable[[], Tensor]]] = {
    "contiguous": lambda: plain(4, 5, 6),
    "transposed": lambda: plain(6, 5, 4).transpose(0, 2),
    "columns": lambda: plain(4, 6, 5).transpose(1, 2),
    "every other": lambda: plain(4, 10, 12)[:, ::2, 1::2],
    "expanded": lambda: plain(4, 1, 6).expand(4, 5, 6),
    "expanded all": lambda: plain(1, 1, 1).expand(3, 4, 5),
    "ones": lambda: plain(1, 5, 1),
    "one": lambda: plain(1, 1, 1),
    "long rows": lambda: plain(2, 3, 1500),
    "long columns": lambda: plain(1500, 2, 3),
    "odd": lambda: plain(3, 17, 33),
}


def odd_values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with NaN, infinities of one and both signs, zeros of both signs, equal elements."""
    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, nan, 3.0, 2.0, -1.0],
        [nan, nan, 1.0, nan, inf],
        [inf, 1.0, -2.0, inf, 0.0],
        [-inf, -inf, -inf, -inf, -inf],
        [inf, -inf, 1.0, 2.0, 3.0],
        [-inf, 2.0, 2.0, 1.0, 2.0],
        [0.0, -0.0, 0.0, -0.0, 0.0],
        [-0.0, -1.0, -3.0, -3.0, -0.0],
        [7.0, 7.0, 7.0, 7.0, 7.0],
    ]
    return torch.tensor(rows, dtype=dtype)
