"""Tensor subclasses, taken apart into plain tensors and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from stator.torch_api import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Plain:
    """One value that a graph takes or returns as it is."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A part that is no tensor: the same object in every call (a device mesh, say)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A subclass: its parts by attribute name, and what it needs to be rebuilt.

    A size or stride of None is symbolic: it travels as an integer behind the parts.
    """

    cls: type
    parts: tuple[tuple[str, Layout], ...]
    context: Any
    size: tuple[int | None, ...]
    stride: tuple[int | None, ...]


Layout: TypeAlias = Plain | Fixed | Wrapped
PLAIN: Final = Plain()


def layout_of(value: Any) -> Layout:
    """How `value` falls apart."""
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return PLAIN
    names, context = value.__tensor_flatten__()
    return Wrapped(
        type(value),
        tuple((name, _part_of(getattr(value, name))) for name in names),
        context,
        tuple(_static(size) for size in value.size()),
        tuple(_static(stride) for stride in value.stride()),
    )


def _part_of(value: Any) -> Layout:
    return layout_of(value) if isinstance(value, torch.Tensor) else Fixed(value)


def _static(size: Any) -> int | None:
    return None if isinstance(size, torch.SymInt) else int(size)


def width(layout: Layout) -> int:
    """How many plain values the layout falls apart into."""
    if not isinstance(layout, Wrapped):
        return int(isinstance(layout, Plain))
    symbolic = (*layout.size, *layout.stride).count(None)
    return symbolic + sum(width(part) for _, part in layout.parts)


def take_apart(value: Any, layout: Layout) -> list[Any]:
    """The plain values of `value`, in the order that `put_together` reads them."""
    if not isinstance(layout, Wrapped):
        return [value] if isinstance(layout, Plain) else []
    plain: list[Any] = []
    for name, part in layout.parts:
        plain += take_apart(getattr(value, name), part)
    plain += [n for n, known in zip(value.size(), layout.size, strict=True) if known is None]
    plain += [n for n, known in zip(value.stride(), layout.stride, strict=True) if known is None]
    return plain


def put_together(layout: Layout, plain: Iterator[Any]) -> Any:
    """The value that falls apart into the next of `plain`."""
    if not isinstance(layout, Wrapped):
        return next(plain) if isinstance(layout, Plain) else layout.value
    parts = {name: put_together(part, plain) for name, part in layout.parts}
    size = tuple(next(plain) if n is None else n for n in layout.size)
    stride = tuple(next(plain) if n is None else n for n in layout.stride)
    return layout.cls.__tensor_unflatten__(  # type: ignore[attr-defined]  # the subclass protocol
        parts, layout.context, torch.Size(size) if _all_ints(size) else size, stride
    )


def _all_ints(size: Iterable[Any]) -> bool:
    return all(isinstance(n, int) for n in size)


def tensor_count(layout: Layout) -> int:
    """How many plain tensors are inside."""
    if not isinstance(layout, Wrapped):
        return int(isinstance(layout, Plain))
    return sum(tensor_count(part) for _, part in layout.parts)


def tensor_parts(value: Any, layout: Layout) -> list[torch.Tensor]:
    """The plain tensors inside `value`, without its symbolic sizes."""
    if not isinstance(layout, Wrapped):
        return [value] if isinstance(layout, Plain) else []
    return [t for name, part in layout.parts for t in tensor_parts(getattr(value, name), part)]
