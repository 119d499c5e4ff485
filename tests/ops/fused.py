"""Parity with eager, and the proof that loops of ours did it: nothing stayed with torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Unpack

import torch
from torch import Tensor

from stator.core.events import last_compilation
from tests.parity import BACKEND, KERNELS, Settings, check

FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TYPES: Final = (*FLOATS, *INTEGERS)

_STAYS: Final = re.compile(r"\w+: (\w+?)(?:_\d+)? stays with torch: (.*)")


def torch_calls() -> dict[str, str]:
    """Nodes of the last compilation that torch executes, with the reason."""
    record = last_compilation()
    assert record is not None, "nothing was compiled"
    assert record.fallback is None, record.fallback
    found = [_STAYS.fullmatch(note) for note in record.notes]
    return {match[1]: match[2] for match in found if match is not None}


def check_fused(
    fn: Callable[..., Any],
    *inputs: Any,
    stays: tuple[str, ...] = (),
    **settings: Unpack[Settings],
) -> None:
    """`check`, and no operator may stay with torch but those named."""
    check(fn, *inputs, **settings)
    if BACKEND.get() == "stator" and KERNELS.get():
        calls = {name: why for name, why in torch_calls().items() if name not in stays}
        assert not calls, f"torch executes {calls}"


def sample(*size: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """Random values that every type holds; floats want gradients."""
    values = torch.randint(-50, 50, size)
    if dtype.is_floating_point:
        return (values / 16).to(dtype).requires_grad_(grad)
    return values % 2 == 0 if dtype is torch.bool else values.to(dtype)
