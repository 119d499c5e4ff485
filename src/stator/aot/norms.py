"""Norms that count their dimensions from the front.

Counted from the end, torch 2.11 takes a dimension of one element for one that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_NORM: Final = torch.ops.aten.linalg_vector_norm.default


def _from_the_front(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims = [dim] if isinstance(dim, int) else dim or []
    if all(d >= 0 for d in dims) or any(d < -x.dim() for d in dims):
        return NotImplemented
    dims = [d + x.dim() if d < 0 else d for d in dims]
    return _NORM(x, ord, dims, keepdim, dtype=dtype)


# Operators, and what calls them otherwise; NotImplemented where that is not needed.
RESPELLED: Final[Mapping[Any, Callable[..., Any]]] = {_NORM: _from_the_front}
