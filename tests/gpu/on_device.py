"""Where the tests run, by STATOR_GPU_TESTS_ON: on the card, unless it says otherwise.

`cpu`: kernels of the CPU, to try the tests.  `interpreter`: kernels of the GPU, in Triton's
interpreter.  What needs a card by its nature (streams, CUDA graphs, the allocator) is marked
`needs_card`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests import parity

WHERE: Final = os.environ.get("STATOR_GPU_TESTS_ON", "cuda")
DEVICE: Final = torch.device("cuda" if WHERE == "cuda" else "cpu")
OPTIONS: Final[dict[str, Any]] = {"codegen": "triton"} if WHERE == "interpreter" else {}
HAS_DEVICE: Final = DEVICE.type != "cuda" or torch.cuda.is_available()
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

needs_card = pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has no such thing")


def several(count: int, fewer: int) -> int:
    """So many on the card, fewer in the interpreter, which runs one program after another."""
    return fewer if WHERE == "interpreter" else count


def randn(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Normal numbers."""
    return torch.randn(size, device=DEVICE).to(dtype).requires_grad_(grad)


def integers(high: int, *size: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(low, high, size, device=DEVICE, dtype=dtype)


def compiled(
    fn: Callable[..., Any], mode: str | None = None, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """`fn` compiled as users have it, our own random numbers included, but never run by eager."""
    from stator.backend import compile_fx

    backend = partial(compile_fx, mode=mode, options={"strict": True, **OPTIONS, **options})
    result: Callable[..., Any] = torch.compile(fn, backend=backend, dynamic=dynamic)
    return result


def check(fn: Callable[..., Any], *inputs: Any, **settings: Any) -> None:
    """`parity.check`, here: nobody could tell `fn` and its compiled twin apart."""
    options = {**OPTIONS, **settings.pop("options", {})}
    parity.check(fn, *inputs, options=options, **settings)


def wait() -> None:
    """Until the device is idle; what went wrong on it is raised here."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
