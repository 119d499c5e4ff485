"""What devices take for work, in bytes that move meanwhile, and what memory is worth on them.

A CPU is two cores with wide vectors; a GPU is an H200, whose arithmetic is nearly free beside its
memory.  What matters are the proportions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes that move meanwhile."""

    easy: float  # an element of simple arithmetic
    hard: float  # one of a function with an exponential in it
    random: float  # a random number
    multiplication: float  # a multiplication and an addition of a library's product


@dataclass(frozen=True, slots=True)
class Prices:
    """What a byte costs that is kept from forward to backward, in bytes of traffic.

    Up to the usual price steps take no longer than if everything is kept: on a CPU, since fresh
    memory is dear on its own.  On a GPU a higher one costs time: measured on ResNet-50, whose step
    takes 26.8 ms at 1 and 28.7 at 2, GPT-2 (19.1 and 19.8) and Llama (16.3 and 16.6).
    """

    usual: float
    slight: float  # for a first part of the program, where that takes next to no time
    may_be_lean: bool  # whether twice the usual price is looked at, for all of it


CPU: Final = Rates(easy=0.25, hard=4.0, random=12.0, multiplication=1 / 5)
GPU: Final = Rates(easy=0.02, hard=0.25, random=0.5, multiplication=1 / 64)

CPU_PRICES: Final = Prices(usual=2.0, slight=2.25, may_be_lean=True)
GPU_PRICES: Final = Prices(usual=1.0, slight=2.0, may_be_lean=False)


def rates_of(value: Any) -> Rates:
    """Those of the device that makes a node's value."""
    return GPU if _is_on_gpu(value) else CPU


def prices_of(nodes: Sequence[fx.Node]) -> Prices:
    """Those of the device that makes some of the values."""
    on_gpu = any(_is_on_gpu(node.meta.get("val")) for node in nodes)
    return GPU_PRICES if on_gpu else CPU_PRICES


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_on_gpu, value))
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
