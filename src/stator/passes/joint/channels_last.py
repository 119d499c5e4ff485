"""Images with their channels last: the layout that convolutions are fastest in.

On a CPU all are; on a GPU those that its tensor cores compute, of half precision and of float32
where torch may round that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.torch_api import OpOverload, detect_fake_mode, is_mutable_op, pytree

aten = torch.ops.aten

ENOUGH: Final = 3  # convolutions: with fewer, turning images around costs more than it gains
SPEAKS_OF_STRIDES: Final = frozenset({aten.as_strided.default})
STAYS: Final = object()
HALVES: Final = (torch.bfloat16, torch.float16)


def channels_last(graph: fx.Graph, ctx: Ctx) -> int:
    """Turn what goes into convolutions, and let the layout spread; return how many nodes have it.

    before: y = convolution(x, w)                             x: f32[N, C, H, W] by rows
    after:  y = convolution(clone(x, channels_last), w)       and so y, and what is made of it
    What the caller gets is turned back.  The backward reads the same copies: where the image is by
    rows, torch would turn its gradient back.
    """
    found = graph.find_nodes(op="call_function", target=aten.convolution.default)
    convolutions = {node for node in found if _is_of_images(node)}
    if len(convolutions) < ENOUGH or not ctx.fuel.spend("channels_last"):
        return 0
    mode = detect_fake_mode([node.meta["val"] for node in convolutions])
    with mode, torch.no_grad():
        spread = _Spread(graph)
        for node in list(graph.nodes):
            if node in convolutions:
                spread.turn(node, image=0, weight=1)
            elif node.target is aten.convolution_backward.default and spread.meets(node.args[0]):
                spread.turn(node, image=1, weight=2)
            spread.follow(node)
    return len(spread.before)


def _is_of_images(node: fx.Node) -> bool:
    image, weight = (arg.meta["val"] for arg in node.args[:2])
    return weight.dim() == 4 and _is_faster_so(image.device, image.dtype)


def _is_faster_so(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether convolutions of a type prefer channels last on a device."""
    if dtype is torch.float32 and device.type == "cuda":
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")
    return device.type in ("cpu", "cuda") and dtype in (torch.float32, *HALVES)


@dataclass(slots=True)
class _Spread:
    """Nodes that lie otherwise than before, in the order of the graph."""

    graph: fx.Graph
    before: dict[fx.Node, Any] = field(default_factory=dict)  # values as they were
    turned: dict[fx.Node, fx.Node] = field(default_factory=dict)
    restored: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def meets(self, gradient: fx.Node) -> bool:
        """Whether a gradient has come to lie channels last."""
        value = gradient.meta["val"]
        return gradient in self.before and value.dim() == 4 and _lies_so(value)

    def turn(self, convolution: fx.Node, *, image: int, weight: int) -> None:
        """Let a convolution read its image channels last, and on a GPU its weight.

        There torch copies a weight that lies otherwise, at every call and slowly.
        """
        self._turn(convolution, image)
        if convolution.args[weight].meta["val"].device.type == "cuda":
            self._turn(convolution, weight)

    def _turn(self, convolution: fx.Node, place: int) -> None:
        source = convolution.args[place]
        value = source.meta["val"]
        if _lies_so(value):
            return
        if source not in self.turned:
            with self.graph.inserting_before(convolution):
                self.turned[source] = self._clone(source, torch.channels_last)
        self.before[self.turned[source]] = value
        convolution.update_arg(place, self.turned[source])

    def follow(self, node: fx.Node) -> None:
        """See how the node's result lies now; where it may not change, give it what it knew."""
        moved = [source for source in node.all_input_nodes if source in self.before]
        if not moved or node in self.before or is_mutable_op(node.target):
            return
        old = node.meta.get("val")
        new = STAYS if node.op == "output" else self._computed(node)
        if new is STAYS:
            for source in moved:
                node.replace_input_with(source, self._as_before(source))
        elif _layouts(new) != _layouts(old):
            node.meta["val"] = new
            self.before[node] = old

    def _computed(self, node: fx.Node) -> Any:
        """The value for its arguments as they lie now; STAYS if it has to be as it was."""
        target = node.target
        is_read = isinstance(target, OpOverload) or target.__module__ == "_operator"
        if not is_read or target in SPEAKS_OF_STRIDES:
            return STAYS
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda source: source.meta["val"], (node.args, node.kwargs)
        )
        try:
            return target(*args, **kwargs)
        except (RuntimeError, ValueError):  # a view that needs the other layout
            return STAYS

    def _as_before(self, source: fx.Node) -> fx.Node:
        if source not in self.restored:
            old = self.before[source]
            with self.graph.inserting_after(source):
                self.restored[source] = self._laid_out(source, old)
        return self.restored[source]

    def _laid_out(self, source: fx.Node, old: torch.Tensor) -> fx.Node:
        if old.is_contiguous():
            return self._clone(source, torch.contiguous_format)
        size, stride = list(old.size()), list(old.stride())
        empty = self.graph.call_function(aten.new_empty_strided.default, (source, size, stride))
        empty.meta = {**source.meta, "val": old}
        with self.graph.inserting_after(empty):
            copy = self.graph.call_function(aten.copy.default, (empty, source))
        copy.meta = {**source.meta, "val": old}
        return copy

    def _clone(self, source: fx.Node, layout: torch.memory_format) -> fx.Node:
        copy = self.graph.call_function(aten.clone.default, (source,), {"memory_format": layout})
        copy.meta = {**source.meta, "val": source.meta["val"].clone(memory_format=layout)}
        return copy


def _lies_so(value: torch.Tensor) -> bool:
    return bool(value.is_contiguous(memory_format=torch.channels_last))


def _layouts(value: Any) -> list[Any]:
    """Strides of all tensors in a value, as hashable expressions."""
    return [
        tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in tensor.stride())
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, torch.Tensor)
    ]
