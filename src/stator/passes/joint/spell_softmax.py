"""The logarithm of softmax in steps, so that the cut sees what is small in it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from stator.graph.build import Builder
from stator.graph.run import Ctx

aten: Final = torch.ops.aten


def spell_softmax(graph: fx.Graph, ctx: Ctx) -> int:
    """Write it out where kernels are for a GPU; return how many were.

    before: y = _log_softmax(x, 1)
    after:  top = amax(x, [1], True);  low = x - top;  y = low - log(sum(exp(low), [1], True))

    The operator's backward reads its result, which is as large as x, and in float32 where x was of
    half precision before.  Of the steps the forward keeps one number a row, and the backward
    computes the rest from x again, in its own kernel.
    """
    spelled = 0
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        value = node.meta["val"]
        x, dim, _ = node.args
        if not _is_for_a_gpu(value, ctx) or x.meta["val"].dtype is not value.dtype:
            continue
        if ctx.fuel.spend(f"spell_softmax: {node.name}"):
            _replace(node, _log_softmax, x, dim)
            spelled += 1
    target = aten._log_softmax_backward_data.default
    for node in graph.find_nodes(op="call_function", target=target):
        gradient, output, dim, dtype = node.args
        value = output.meta["val"]
        if not _is_for_a_gpu(value, ctx) or dtype is not value.dtype:
            continue
        if ctx.fuel.spend(f"spell_softmax: {node.name}"):
            _replace(node, _backward, gradient, output, dim)
            spelled += 1
    return spelled


def _is_for_a_gpu(value: Any, ctx: Ctx) -> bool:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    return value.device.type == "cuda" or ctx.options.codegen == "triton"


def _log_softmax(x: Any, dim: int) -> Any:
    low = x - aten.amax(x, [dim], True)
    return low - aten.log(aten.sum.dim_IntList(aten.exp(low), [dim], True))


def _backward(gradient: Any, output: Any, dim: int) -> Any:
    return gradient - aten.exp(output) * aten.sum.dim_IntList(gradient, [dim], True)


def _replace(node: fx.Node, function: Any, *args: Any) -> None:
    new = Builder(node.graph, node).run(function, *args)
    kept = {name: value for name, value in node.meta.items() if name != "val"}
    new.meta |= kept
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
