"""Views as recipes: how an output is made again from its base, after the call."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stator.torch_api import is_view_op


@dataclass(frozen=True, slots=True)
class Step:
    """One view operator applied to the result of the step before."""

    target: Any
    args: tuple[Any, ...]  # beyond the tensor
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size, stride and offset from the base, for `as_strided`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class View:
    """How to make a view of a base: operators to replay, or where it lies.

    Where sizes are symbolic and there is no static chain, the forward graph returns the view too,
    as value `template`, and the view lies where that does.
    """

    steps: tuple[Step, ...] = ()
    geometry: Geometry | None = None
    template: int | None = None
    detach: bool = False  # the view does not require grad although the base does
    no_grad: bool = False  # it was taken where grad mode was off: it has no history

    def replay(self, base: torch.Tensor, template: torch.Tensor | None = None) -> torch.Tensor:
        """The view of `base`."""
        value: Any = base
        place = self.geometry if template is None else _place(base, template)
        if place is not None:
            offset = base.storage_offset() + place.offset
            value = base.as_strided(place.size, place.stride, offset)
        for step in self.steps:
            value = step.target(value, *step.args, **dict(step.kwargs))
        assert isinstance(value, torch.Tensor), "a view ends in a tensor"
        return value


def steps_between(base: fx.Node, view: fx.Node) -> tuple[Step, ...] | None:
    """View operators that lead from `base` to `view`; None if there is no such static chain."""
    steps: list[Step] = []
    node = view
    while node is not base:
        if node.op != "call_function":
            return None
        is_item = node.target is operator.getitem
        if not is_item and not is_view_op(node.target):
            return None
        source, *rest = node.args
        if not isinstance(source, fx.Node) or not _is_static((rest, node.kwargs)):
            return None
        steps.append(Step(node.target, tuple(rest), tuple(node.kwargs.items())))
        node = source
    return tuple(reversed(steps))


def _is_static(arguments: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return not found


def geometry_between(base: torch.Tensor, view: torch.Tensor) -> Geometry | None:
    """Where `view` lies in the storage of `base`; None if a size is symbolic or types differ."""
    offset = view.storage_offset() - base.storage_offset()
    numbers = (*view.size(), *view.stride(), offset)
    if any(isinstance(n, torch.SymInt) for n in numbers) or view.dtype != base.dtype:
        return None
    return Geometry(tuple(view.size()), tuple(view.stride()), int(offset))


def _place(base: torch.Tensor, template: torch.Tensor) -> Geometry:
    """Where `template` lies in its own storage, which is the base's or one laid out like it."""
    shares = base.untyped_storage().data_ptr() == template.untyped_storage().data_ptr()
    offset = template.storage_offset() - (base.storage_offset() if shares else 0)
    return Geometry(tuple(template.size()), tuple(template.stride()), offset)
