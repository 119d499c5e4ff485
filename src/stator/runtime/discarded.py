"""Weights whose memory was given back: their sizes are there, and touching them says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from stator.torch_api import without_overrides

# What may be asked of a weight that is gone: guards, names and printing of a module need it.
_FACTS: Final = frozenset(
    ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "grad", "itemsize")
)
_METHODS: Final = frozenset(("size", "dim", "numel", "is_floating_point", "is_complex"))


GONE: Final = (
    "this weight was given back when its program was frozen with discard_parameters: nothing else "
    "can read it, nor be compiled of it (for another batch size, unless by dynamic=True, another "
    "mode of gradients, another graph); leave that option off to keep weights"
)


class Gone(RuntimeError):  # noqa: N818  says what it is
    """Somebody touched a weight that was discarded."""


def _refuse(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    name = getattr(func, "__name__", "")
    if name in _METHODS or (name == "__get__" and attribute in _FACTS):
        with without_overrides():
            return func(*args, **(kwargs or {}))
    raise Gone(GONE)


class DiscardedParameter(nn.Parameter):
    """A parameter without its memory."""

    __torch_function__ = classmethod(_refuse)


class DiscardedBuffer(Tensor):
    """A buffer without its memory."""

    __torch_function__ = classmethod(_refuse)


def is_discarded(weight: Any) -> bool:
    """Whether its memory is gone."""
    return isinstance(weight, DiscardedParameter | DiscardedBuffer)


def check_alive(values: Iterable[Any]) -> None:
    """Refuse what is left of discarded weights: libraries would read it as if it were whole."""
    if any(map(is_discarded, values)):
        raise Gone(GONE)


def discard(weight: Tensor) -> None:
    """Give the memory back; whoever else holds it keeps it."""
    if is_discarded(weight):
        return
    is_parameter = isinstance(weight, nn.Parameter)
    weight.data = torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.size())
    weight.__class__ = DiscardedParameter if is_parameter else DiscardedBuffer
