"""Where the largest elements of windows lie, in as few bytes as that takes."""

from __future__ import annotations

import operator
from math import prod
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.run import Ctx

aten: Final = torch.ops.aten

BACKWARDS: Final[dict[Any, tuple[Any, int]]] = {  # to who found the places, in how many dimensions
    aten.max_pool2d_with_indices_backward.default: (aten.max_pool2d_with_indices.default, 2),
    aten.max_pool3d_with_indices_backward.default: (aten.max_pool3d_with_indices.default, 3),
    aten.adaptive_max_pool2d_backward.default: (aten.adaptive_max_pool2d.default, 2),
    aten.adaptive_max_pool3d_backward.default: (aten.adaptive_max_pool3d.default, 3),
}
NARROW: Final = (torch.int8, torch.int16, torch.int32)


def narrow_indices(graph: fx.Graph, ctx: Ctx) -> int:
    """Let backwards of max pooling read places in a narrow type; return how many do.

    before: z = max_pool_backward(grad, x, …, places)
    after:  few = places.to(int16);  z = max_pool_backward(grad, x, …, few.to(int64))

    Torch's places take 8 bytes each, and are below the number of elements that windows go over.
    The cut keeps the narrow ones; so the forward writes less, too.
    """
    narrowed = 0
    for target, (maker, dimensions) in BACKWARDS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            places = node.args[-1]
            kind = _type_for(node.args[1], dimensions)
            if kind is None or not _is_from(places, maker):
                continue
            if ctx.fuel.spend(f"narrow_indices: {node.name}"):
                few = Builder(graph, places.next).run(_cast, places, kind)
                wide = Builder(graph, node).run(_cast, few, torch.int64)
                node.update_arg(len(node.args) - 1, wide)
                narrowed += 1
    return narrowed


def _type_for(x: fx.Node, dimensions: int) -> torch.dtype | None:
    """The narrowest type that has a number for each element that windows go over."""
    sizes = x.meta["val"].shape[-dimensions:]
    if not all(isinstance(size, int) for size in sizes):
        return None
    last = prod(sizes) - 1
    return next((kind for kind in NARROW if last <= torch.iinfo(kind).max), None)


def _is_from(places: Any, maker: Any) -> bool:
    """Whether this graph finds the places: those of others may be anything."""
    return places.target is operator.getitem and places.args[0].target is maker


def _cast(places: Any, kind: torch.dtype) -> Any:
    return aten._to_copy(places, dtype=kind)
