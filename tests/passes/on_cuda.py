"""Graphs of a GPU that need not be there: recorded on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

from stator.torch_api import FakeTensorMode, make_fx

CUDA: Final = torch.device("cuda", 0)


def fakes(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Fake tensors on a GPU."""
    with FakeTensorMode():
        return [torch.empty(size, dtype=dtype, device=CUDA) for size in sizes]


def graph_of(fn: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """`fn` recorded operator by operator on fake tensors, of one mode."""
    (mode, *_) = {value.fake_mode for value in inputs if isinstance(value, Tensor)}
    with mode:
        module: fx.GraphModule = make_fx(fn)(*inputs)
    return module
