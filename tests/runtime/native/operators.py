"""Operators in Python, called in the middle of a graph: they raise, keep, lie, and call back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

ERRORS: Final[dict[int, Callable[[], BaseException]]] = {
    1: lambda: ValueError("not this one"),
    2: lambda: KeyError("missing"),
    3: lambda: StopIteration("at an end"),
    4: lambda: SystemExit(3),
    5: lambda: KeyboardInterrupt(),
    6: lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no letter"),
}
kept: Final[list[Tensor]] = []  # by `keep`
inside: Final[list[Callable[[Tensor], Tensor]]] = []  # what `call_back` calls


@torch.library.custom_op("stator_native::fail", mutates_args=())
def fail(x: Tensor, kind: int) -> Tensor:
    """A copy, or one of ERRORS."""
    if kind in ERRORS:
        raise ERRORS[kind]()
    return x.clone()


@fail.register_fake
def _(x: Tensor, kind: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("stator_native::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """A copy; the argument stays in a list."""
    kept.append(x)
    return x.clone()


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("stator_native::call_back", mutates_args=())
def call_back(x: Tensor) -> Tensor:
    """What the function in the list makes of it."""
    return inside[-1](x)


@call_back.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("stator_native::lay", mutates_args=())
def lay(x: Tensor, how: str) -> Tensor:
    """A copy, laid otherwise or of another type than it says."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "with gaps":
        return x.repeat_interleave(2, 1)[:, ::2]
    return x.double() if how == "double" else x.clone()


@lay.register_fake
def _(x: Tensor, how: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


@torch.library.custom_op("stator_native::negate_", mutates_args=("x",))
def negate_(x: Tensor, y: Tensor) -> None:
    """x = -y, in place."""
    x.copy_(-y)


@torch.library.custom_op("stator_native::narrow", mutates_args=())
def narrow(x: Tensor, rows: int) -> Tensor:
    """Its first rows, though it says: all."""
    return x[:rows].clone()


@narrow.register_fake
def _(x: Tensor, rows: int) -> Tensor:
    return torch.empty_like(x)
