"""Convolutions with weights read them packed, as oneDNN wants them for images of one size."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import onednn_convolution
from stator.ops.packs import onednn_convolution_weight
from stator.passes.freezing.measure import Ways, fastest
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

LAYOUTS: Final = (torch.contiguous_format, torch.channels_last)


def pack_convolution(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions read packed weights; return how many do.

    before: y = convolution(x, w, b, …)                  w: a weight
    after:  y = _convolution_pointwise(x, onednn_convolution_weight(w, …), b, …, "none", [], "")
    """
    convolve, settled = onednn_convolution(), constant_nodes(graph)
    if convolve is None or not settled:
        return 0
    packed = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (aten.convolution.default, convolve):
            continue
        if node.args[1] not in settled:
            continue
        arguments = _arguments(node)
        reason = _why_not(node, arguments, convolve)
        if reason is None and not ctx.fuel.spend(f"pack_convolution: {node.name}"):
            continue
        said = "reads its weight packed by oneDNN" if reason is None else f"not packed: {reason}"
        ctx.record.notes.append(f"{node.name} {said}")
        if reason is None:
            _rewrite(node, arguments, convolve)
            packed += 1
    return packed


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """What oneDNN's convolution is called with in the place of the node."""
    if node.target is not aten.convolution.default:
        return tuple(node.args)
    x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    return (x, weight, bias, padding, stride, dilation, groups, "none", [], "")


def _why_not(node: fx.Node, arguments: tuple[Any, ...], convolve: Any) -> str | None:
    image, weight = (source.meta["val"] for source in arguments[:2])
    if image.device.type != "cpu" or {image.dtype, weight.dtype} != {torch.float32}:
        return "it is not of float32 on the CPU"
    if node.target is aten.convolution.default and node.args[6]:
        return "it is a transposed one"
    if image.dim() != 4 or not all(isinstance(n, int) for n in (*image.size(), *image.stride())):
        return "it is not one of images whose sizes are known"
    if not any(image.is_contiguous(memory_format=layout) for layout in LAYOUTS):
        return "its image lies in an order of its own"
    key = ("convolution", _kind(image), _kind(weight), arguments[2] is not None, str(arguments[3:]))
    way, seconds = fastest(key, lambda: _ways(image, weight, arguments, convolve))
    if way == "plain":
        told = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in seconds.items())
        return f"it is no faster ({told})"
    return None


def _kind(value: torch.Tensor) -> Any:
    return tuple(value.size()), tuple(value.stride())


def _ways(
    image: torch.Tensor, weight: torch.Tensor, arguments: tuple[Any, ...], convolve: Any
) -> Ways:
    x, w = (torch.empty_strided(v.size(), v.stride()).fill_(0.5) for v in (image, weight))
    bias = None if arguments[2] is None else torch.zeros(weight.size(0))
    padding, stride, dilation, groups = arguments[3:7]
    packed = onednn_convolution_weight(w, padding, stride, dilation, groups, list(image.size()))
    return {
        "packed": lambda: convolve(x, packed, bias, *arguments[3:]),
        "plain": lambda: convolve(x, w, bias, *arguments[3:]),
    }


def _rewrite(node: fx.Node, arguments: tuple[Any, ...], convolve: Any) -> None:
    graph, (x, weight, bias, *rest) = node.graph, arguments
    with graph.inserting_before(node):
        packed = graph.call_function(
            onednn_convolution_weight, (weight, *rest[:4], list(x.meta["val"].size()))
        )
        packed.meta = {"val": weight.meta["val"]}  # its sizes; nobody but the library reads it
        convolved = graph.call_function(convolve, (x, packed, bias, *rest))
    convolved.meta = dict(node.meta)
    node.replace_all_uses_with(convolved)
    graph.erase_node(node)
