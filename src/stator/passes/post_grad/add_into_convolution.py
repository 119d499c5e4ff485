"""Sums inside of oneDNN's convolutions, which add to a tensor where that lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import onednn_convolution, onednn_convolution_plus

aten = torch.ops.aten


def add_into_convolution(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions with packed weights add what a kernel would; return how many do.

    before: y = _convolution_pointwise(x, w, b, …, "none", [], "");  z = add(y, other)
    after:  z = _convolution_pointwise.binary(x, other, w, b, …, "add", None, None, [], None)

    Only to what is in memory anyway, and is read no more behind: there the sum costs nothing.
    """
    convolve, plus = onednn_convolution(), onednn_convolution_plus()
    if convolve is None or plus is None:
        return 0
    inside = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        parts = _parts(node, convolve)
        if parts is None:
            continue
        convolution, other = parts
        reason = _why_not(node, other, (convolve, plus, aten.convolution.default))
        if convolution.args[0] is other:
            reason = f"{other.name} is its image"
        words = (f"is inside of {convolution.name}", f"is not inside of {convolution.name}")
        if ctx.may("add_into_convolution", node, reason, words):
            _rewrite(node, convolution, other, plus)
            inside += 1
    return inside


def _parts(node: fx.Node, convolve: Any) -> tuple[fx.Node, fx.Node] | None:
    """The convolution that is added, and what to: of two convolutions, the later is added."""
    if node.kwargs or len(node.all_input_nodes) != 2:
        return None
    before, behind = sorted(node.all_input_nodes)
    for convolution, other in ((behind, before), (before, behind)):
        is_plain = convolution.target is convolve and convolution.args[7] == "none"
        if is_plain and list(convolution.users) == [node]:
            return convolution, other
    return None


def _why_not(node: fx.Node, other: fx.Node, convolutions: tuple[Any, ...]) -> str | None:
    made, old = node.meta["val"], other.meta["val"]
    if (made.dtype, made.size(), made.stride()) != (old.dtype, old.size(), old.stride()):
        return f"{other.name} has another shape"
    if other.op != "call_function":
        return f"{other.name} is the caller's"
    late = next((user for user in other.users if user is not node and not user < node), None)
    if late is not None:
        return f"{late.name} reads {other.name} later"
    if not any(one.target in convolutions for one in (other, *other.users)):
        return f"{other.name} may be computed in passing"
    return None


def _rewrite(node: fx.Node, convolution: fx.Node, other: fx.Node, plus: Any) -> None:
    image, *rest = convolution.args[:7]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(plus, (image, other, *rest, "add", None, None, [], None))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    node.graph.erase_node(convolution)
