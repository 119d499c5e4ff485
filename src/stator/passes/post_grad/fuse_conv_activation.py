"""Activations inside of oneDNN's convolutions, where a kernel would read and write the image again.

Only those that oneDNN computes as eager does: its relu makes 0 of NaN, its gelu NaN of infinity.
`benchmarks/conv_activation.py` measures the rule: 0.5 to 1.0 of the time where it says yes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import onednn_convolution
from stator.ops.table import POINTWISE, RULES, VIEW_RULES

aten = torch.ops.aten

ACTIVATIONS: Final[dict[Any, str]] = {  # and what oneDNN calls them
    aten.leaky_relu.default: "leaky_relu",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "swish",
    aten.tanh.default: "tanh",
}
LEFT_OUT: Final[dict[Any, str]] = {  # those that it has, but other numbers for some
    aten.relu.default: "oneDNN's makes 0 of NaN",
    aten.hardtanh.default: "oneDNN's makes a bound of NaN",
    aten.clamp.default: "oneDNN's makes a bound of NaN",
    aten.gelu.default: "oneDNN's makes NaN of infinity",
    aten.hardswish.default: "oneDNN's makes large numbers of infinities",
}
LEAST: Final = 1 << 18  # elements of the result: a smaller one stays in the cache
LAYOUTS: Final = (torch.contiguous_format, torch.channels_last)
DEEPEST: Final = 1152  # products for an element: beyond that, writing it is the smaller part


def fuse_conv_activation(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions apply the activation behind them; return how many do.

    before: y = convolution(x, w, b, …);  z = silu(y)
    after:  z = _convolution_pointwise(x, w, b, …, "swish", [], "")
    """
    convolve = onednn_convolution()
    if convolve is None:
        return 0
    fused = 0
    for target in (*ACTIVATIONS, *LEFT_OUT):
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0]
            if source.target is not aten.convolution.default:
                continue
            reason = why_not_inside(source, node)
            if target in LEFT_OUT:
                if reason is not None:  # nobody would expect it inside
                    continue
                reason = LEFT_OUT[target]
            words = (f"is inside of {source.name}", f"is not inside of {source.name}")
            if ctx.may("fuse_conv_activation", node, reason, words):
                fuse(source, node, convolve)
                fused += 1
    return fused


def why_not_inside(convolution: fx.Node, activation: fx.Node) -> str | None:
    """None if the activation had better be the convolution's own; otherwise the reason."""
    if list(convolution.users) != [activation]:
        return f"others read {convolution.name}, too"
    x, weight, *_, transposed, _, groups = convolution.args
    image, kernel, result = (node.meta["val"] for node in (x, weight, activation))
    if any(v.dtype is not torch.float32 or v.device.type != "cpu" for v in (image, kernel)):
        return "it is not of float32 on the CPU"
    if transposed:
        return "oneDNN's transposed ones gain nothing by it, and their sigmoid makes 0 of NaN"
    sizes = (*image.size(), *kernel.size())
    if groups != 1 or kernel.dim() != 4 or not all(type(n) is int for n in sizes):
        return "it is not a plain one of images whose sizes are known"
    if not any(image.is_contiguous(memory_format=layout) for layout in LAYOUTS):
        return "its image lies in an order of its own"
    if result.numel() < LEAST:
        return "its result is small"
    if kernel[0].numel() > DEEPEST:
        return f"at {kernel[0].numel()} products for an element, writing it is the smaller part"
    return _why_not_alike(activation)


def _why_not_alike(activation: fx.Node) -> str | None:
    """None if it is eager's for every number, and no kernel computes it in passing."""
    if activation.target is aten.leaky_relu.default and not _slope(activation) > 0:
        return "with this slope, oneDNN makes 0 of NaN"
    for reader in activation.users:
        if any(reader.target in table for table in (POINTWISE, RULES, VIEW_RULES)):
            return f"{reader.name} reads it, and computes it in passing"
    return None


def _slope(leaky_relu: fx.Node) -> float:
    return float(leaky_relu.args[1]) if len(leaky_relu.args) > 1 else 0.01


def fuse(convolution: fx.Node, activation: fx.Node, convolve: Any) -> None:
    """Replace both by one call."""
    x, weight, bias, stride, padding, dilation, _, _, groups = convolution.args
    name = ACTIVATIONS[activation.target]
    numbers = [_slope(activation)] if name == "leaky_relu" else []
    graph = activation.graph
    with graph.inserting_before(activation):
        fused = graph.call_function(
            convolve,
            (x, weight, bias, padding, stride, dilation, groups, name, numbers, ""),
        )
    fused.meta = dict(activation.meta)
    activation.replace_all_uses_with(fused)
    graph.erase_node(activation)
    graph.erase_node(convolution)
