"""Calls of a plan: which C function does one, into which memory, and how much it makes itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import TORCH_DTYPES
from stator.graph.verify import user_line
from stator.loops.index import Index
from stator.lower.sizes import Sizes
from stator.ops.writes import onto
from stator.runtime.native.shims import FRESH, INTO_MEMORY, symbol_of
from stator.runtime.plan import Allocation, Call, View
from stator.torch_api import is_fake, keeps_nothing


def call_of(node: fx.Node) -> Call:
    """A call of the node's operator."""
    made = node.meta.get("val")
    parts = len(made) if isinstance(made, tuple | list) else None
    return Call(
        node.name, node.target, node.args, dict(node.kwargs), line=user_line(node), parts=parts
    )


def call_onto(node: fx.Node, old: str) -> Call:
    """A call that does the node's work in the memory of what it adds to."""
    way = onto(node.target)
    assert way is not None, "the scheduler asked"
    name = f"{node.name}_onto_{old}"
    return Call(name, way.operator, way.arguments(node.args), {}, line=user_line(node), onto=old)


def through_c(call: Call, node: fx.Node, sizes: Sizes, device: torch.device) -> Call:
    """`call` through a C function where there is one, into planned memory where that takes some.

    For tensors on `device`, which is the plan's; torch calls what is elsewhere.
    """
    made = node.meta.get("val")
    if keeps_nothing(_maker(node)):
        call = replace(call, bytes=_bytes(made, sizes))
    if not all(_is_plain(source.meta.get("val"), device) for source in node.all_input_nodes):
        return call
    symbol = symbol_of(INTO_MEMORY.get(call.target), device)
    if symbol is not None and _is_plain(made, device):
        layout = _layout(made, sizes)
        if layout is not None and made.dtype in TORCH_DTYPES:
            return replace(call, symbol=symbol, out=Allocation(call.name, *layout, made.dtype))
    symbol = symbol_of(FRESH.get(call.target), device)
    return call if symbol is None else replace(call, symbol=symbol)


def _maker(node: fx.Node) -> Any:
    """The operator that made what the node is, or is a part of."""
    whole = node.args[0] if node.target is operator.getitem else node
    return whole.target if isinstance(whole, fx.Node) else node.target


def view_of(call: Call, node: fx.Node, sizes: Sizes, device: torch.device) -> View | None:
    """`call` as nothing but another look at its first argument's memory; None if it is more.

    Of a tensor on `device`, which is the plan's.
    """
    made = node.meta.get("val")
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0].meta.get("val")
    if call.target not in _VIEWS or not (_is_plain(made, device) and _is_plain(source, device)):
        return None
    if not isinstance(made, torch.Tensor) or not isinstance(source, torch.Tensor):
        return None
    layout, start = _layout(made, sizes), _start(call, source, sizes)
    before, after = sizes.index(source.storage_offset()), sizes.index(made.storage_offset())
    if layout is None or start is None or before is None or after is not before + start:
        return None
    if made.dtype not in TORCH_DTYPES or _layout(source, sizes) is None:
        return None
    view = Allocation(call.name, *layout, made.dtype)
    return View(node.args[0].name, view, start, call)


def _start(call: Call, source: torch.Tensor, sizes: Sizes) -> Index | None:
    """Where a view begins in its source; None where numbers of the arguments are not known."""
    if any(isinstance(argument, fx.Node) for argument in call.args[1:]):
        return None
    return sizes.index(_VIEWS[call.target](source, *call.args[1:], **call.kwargs))


def _at_the_start(source: torch.Tensor, *_: Any, **__: Any) -> Any:
    return 0


def _selected(source: torch.Tensor, dim: int, index: Any) -> Any:
    return (source.size(dim) + index if index < 0 else index) * source.stride(dim)


def _sliced(
    source: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    first, length = start or 0, source.size(dim)
    if first and isinstance(length, torch.SymInt):
        return None  # whether it is within the bounds shows when it runs
    first = max(first + length, 0) if first < 0 else min(first, length)
    return first * source.stride(dim)


aten: Final = torch.ops.aten
# Where a view's first element is, counted from its source's.
_VIEWS: Final[Mapping[Any, Callable[..., Any]]] = {
    **dict.fromkeys(
        (
            aten._unsafe_view.default,
            aten.alias.default,
            aten.detach.default,
            aten.expand.default,
            aten.permute.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.t.default,
            aten.transpose.int,
            aten.unsqueeze.default,
            aten.view.default,
        ),
        _at_the_start,
    ),
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
}


def _is_plain(value: Any, device: torch.device) -> bool:
    """Whether it is a number, or a tensor on the device as kernels know them."""
    if not isinstance(value, torch.Tensor):
        return True
    here = value.device.type == device.type and device.index in (None, value.device.index)
    return is_fake(value) and here and value.layout is torch.strided


def _layout(
    value: torch.Tensor, sizes: Sizes
) -> tuple[tuple[Index, ...], tuple[Index, ...]] | None:
    known = [sizes.index(number) for number in (*value.size(), *value.stride())]
    found = tuple(number for number in known if number is not None)
    return (found[: value.dim()], found[value.dim() :]) if len(found) == len(known) else None


def _bytes(made: Any, sizes: Sizes) -> Index | None:
    """How much a call makes; None where that shows only when it runs."""
    tensors = [made] if isinstance(made, torch.Tensor) else made
    if not isinstance(tensors, tuple | list):
        return None
    total = Index.of(0)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            layout = _layout(tensor, sizes)
            if layout is None:
                return None
            total = total + Allocation("", *layout, tensor.dtype).elements * tensor.dtype.itemsize
    return total
