"""Convolutions with weights read them packed, as oneDNN wants them for images of one size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import onednn_convolution, onednn_transposed_convolution
from stator.ops.packs import onednn_convolution_weight, onednn_transposed_convolution_weight
from stator.passes.freezing.measure import Ways, example, fastest, in_words, kind_of
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

LAYOUTS: Final = (torch.contiguous_format, torch.channels_last)
FLOATS: Final = (torch.float32, torch.bfloat16)
# Products of numbers from which on a packed weight is as fast or faster where images lie channels
# last (docs/decisions/2026-11-16-packed-convolutions.md): that need not be measured.
SURE: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution in the graph, as a call of oneDNN's: of x, weight and bias."""

    node: fx.Node
    is_transposed: bool
    shape: tuple[Any, ...]  # padding, that of the result if it is a transposed one, stride, …
    behind: tuple[Any, ...] = ("none", [], "")  # the activation

    @property
    def call(self) -> Any:
        """The library's operator."""
        return onednn_transposed_convolution() if self.is_transposed else onednn_convolution()

    @property
    def pack(self) -> Callable[..., torch.Tensor]:
        """What packs its weight."""
        transposed, plain = onednn_transposed_convolution_weight, onednn_convolution_weight
        return transposed if self.is_transposed else plain

    @property
    def gains_surely(self) -> bool:
        """Whether it is one that no measurement found to be slower when its weight is packed."""
        result, weight = self.node.meta["val"], self.node.args[1].meta["val"]
        products = result.numel() * weight.numel() // weight.size(0)
        return not self.is_transposed and self.layout is None and products >= SURE

    @property
    def layout(self) -> torch.memory_format | None:
        """How its result has to be laid out; None if as a packed one's, channels last."""
        result = self.node.meta["val"]
        if result.stride() == _channels_last(result).stride():
            return None
        return torch.contiguous_format if result.is_contiguous() else torch.channels_last


def pack_convolution(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions read packed weights; return how many do.

    before: y = convolution(x, w, b, …)                  w: a weight, x: channels last
    after:  y = _convolution_pointwise(x, onednn_convolution_weight(w, …), b, …, "none", [], "")
    Transposed ones likewise.  An image by rows gives one with its channels last, which is cloned.
    """
    settled = constant_nodes(graph)
    if onednn_convolution() is None or not settled:
        return 0
    packed = 0
    for node in list(graph.nodes):
        found = _convolution(node)
        if found is None or node.args[1] not in settled:
            continue
        reason = _why_not(found, measures=ctx.has_python)
        words = ("reads its weight packed by oneDNN", "not packed")
        if ctx.may("pack_convolution", node, reason, words):
            _rewrite(found)
            packed += 1
    return packed


def _convolution(node: fx.Node) -> Convolution | None:
    """The node as a convolution, if it is one."""
    if node.op != "call_function":
        return None
    if node.target is aten.convolution.default:
        stride, padding, dilation, is_transposed, beyond, groups = node.args[3:]
        more = (beyond,) if is_transposed else ()
        return Convolution(node, is_transposed, (padding, *more, stride, dilation, groups))
    if node.target is onednn_convolution():
        return Convolution(node, False, node.args[3:-3], node.args[-3:])
    return None


def _why_not(found: Convolution, *, measures: bool) -> str | None:
    """None if it should read its weight packed; a package, for other machines, measures nothing."""
    image, weight = (source.meta["val"] for source in found.node.args[:2])
    if image.device.type != "cpu" or image.dtype not in FLOATS or weight.dtype is not image.dtype:
        return "it is not of float32 or bfloat16 on the CPU"
    if image.dim() != 4 or not all(isinstance(n, int) for n in (*image.size(), *image.stride())):
        return "it is not one of images whose sizes are known"
    if not any(image.is_contiguous(memory_format=layout) for layout in LAYOUTS):
        return "its image lies in an order of its own"
    if found.is_transposed and any(map(operator.ge, *found.shape[1:3])):
        return "its result is padded by a stride or more"  # oneDNN takes no such one
    if not measures:
        return None if found.layout is None else "it gives an image by rows"
    if found.gains_surely:
        return None
    key = (found.pack, *map(kind_of, found.node.args[:3]), str((found.shape, found.behind)))
    way, seconds = fastest(key, lambda: _ways(found))
    return f"it is no faster ({in_words(seconds)})" if way == "plain" else None


def _ways(found: Convolution) -> Ways:
    x, weight, bias = map(example, found.node.args[:3])
    packed = found.pack(weight, *found.shape, list(x.size()))
    layout = found.layout

    def convolved() -> torch.Tensor:
        result: torch.Tensor = found.call(x, packed, bias, *found.shape, *found.behind)
        return result if layout is None else result.clone(memory_format=layout)

    plain = partial(found.node.target, x, weight, bias, *found.node.args[3:])
    return {"packed": convolved, "plain": plain}


def _rewrite(found: Convolution) -> None:
    node, graph, layout = found.node, found.node.graph, found.layout
    x, weight, bias = node.args[:3]
    with graph.inserting_before(node):
        image = list(x.meta["val"].size())
        packed = graph.call_function(found.pack, (weight, *found.shape, image))
        packed.meta = {"val": weight.meta["val"]}  # its sizes; nobody but the library reads it
        result = graph.call_function(found.call, (x, packed, bias, *found.shape, *found.behind))
        result.meta = {**node.meta, "val": _channels_last(node.meta["val"])}
        if layout is not None:
            result = graph.call_function(aten.clone.default, (result,), {"memory_format": layout})
            result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _channels_last(image: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(image, memory_format=torch.channels_last)
