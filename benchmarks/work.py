"""What a program cannot do without: bytes that must move, multiplications that must be done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.case import Task
from benchmarks.closeness import tensors

LARGEST_COPY: Final = 256 << 20  # bytes; beyond it a copy runs at one speed, that of memory
PRODUCT: Final = 1024  # rows and columns of the matrix product that shows the machine's speed


def total_bytes(values: Iterable[Tensor]) -> int:
    """Bytes of the elements; a tensor that occurs twice counts once."""
    return sum({id(value): value.nbytes for value in values}.values())


def moved_bytes(task: Task, output: Any) -> int:
    """Each input and weight read once, each result and gradient written once."""
    if task.moved is not None:
        return task.moved
    tangent = [] if task.tangent is None else [task.tangent]
    read = total_bytes([*task.inputs, *task.weights, *task.written, *tangent])
    gradients = [leaf.grad for leaf in task.leaves if leaf.grad is not None]
    return read + total_bytes([*tensors(output), *task.written, *gradients])


def weights_of(module: nn.Module) -> tuple[Tensor, ...]:
    """Parameters that a forward reads in full: all but tables that are only looked up in."""
    lookups = (nn.Embedding, nn.EmbeddingBag)
    read = {
        id(parameter): parameter
        for part in module.modules()
        if not isinstance(part, lookups)
        for parameter in part.parameters(recurse=False)
    }
    return tuple(read.values())


def count_flops(task: Task) -> int:
    """Floating-point operations of products and convolutions, in one call run by eager."""
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setting mkldnn's flags warns of GPUs that are not there
        # Fused attention and oneDNN's LSTM are not seen into: they run as their plain products.
        with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), counter:
            task.step(task.program)
    return int(counter.get_total_flops())


def copied_bytes(moved: int) -> int:
    """How much a copy of the row's size class moves, read and written; a whole number of pairs."""
    return max(8, min(moved, LARGEST_COPY) // 8 * 8)


def copy_call(moved: int) -> Callable[[], Any]:
    """A copy into warm memory that moves `copied_bytes(moved)`."""
    source = torch.ones(copied_bytes(moved) // 8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product_call() -> Callable[[], Any]:
    """A square matrix product of PRODUCT_FLOPS operations."""
    left, right = torch.randn(2, PRODUCT, PRODUCT).unbind()
    target = torch.empty(PRODUCT, PRODUCT)
    return lambda: torch.mm(left, right, out=target)


PRODUCT_FLOPS: Final = 2 * PRODUCT**3
