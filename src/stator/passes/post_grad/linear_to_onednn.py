"""Products with large weights go to oneDNN: for a few hundred rows it beats MKL's plain product.

Measured on two AVX-512 cores at 128 rows: weights of 5632x2048 run at 234 GFLOP/s instead of 199,
32000x2048 at 263 instead of 213; 768x768 at 221 instead of 222.  From about a thousand rows on MKL
wins again, and it always does where the weight lies the other way (docs/decisions).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import onednn_linear

aten = torch.ops.aten

LARGE_WEIGHT: Final = 1 << 21  # elements
ROWS: Final = range(8, 769)


def linear_to_onednn(graph: fx.Graph, ctx: Ctx) -> int:
    """Rewrite the products that gain by it; return how many.

    before: y = addmm(bias, x, t(w))      x: f32[128, 2048], w: f32[5632, 2048], both by rows
    after:  y = _linear_pointwise(x, w, bias, "none", [], "")
    """
    linear = onednn_linear()
    if linear is None:
        return 0
    rewritten = 0
    for target in (aten.addmm.default, aten.mm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            bias, x, turned = node.args if target is aten.addmm.default else (None, *node.args)
            if node.kwargs or not _gains(x, turned, bias) or not ctx.fuel.spend(node.name):
                continue
            with graph.inserting_before(node):
                weight = graph.call_function(aten.t.default, (turned,))
                weight.meta = {**turned.meta, "val": turned.meta["val"].t()}
                product = graph.call_function(linear, (x, weight, bias, "none", [], ""))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)
            rewritten += 1
    return rewritten


def _gains(x: fx.Node, turned: fx.Node, bias: fx.Node | None) -> bool:
    """Whether it is one row's bias on many rows, times a large weight that lies by columns."""
    left, right = x.meta["val"], turned.meta["val"]
    if left.device.type != "cpu" or any(t.dtype is not torch.float32 for t in (left, right)):
        return False
    sizes = (*left.size(), *right.size(), *left.stride(), *right.stride())
    if not all(isinstance(number, int) for number in sizes):
        return False
    depth, width = right.size()
    if not left.is_contiguous() or right.stride() != (1, depth):
        return False
    return left.size(0) in ROWS and depth * width >= LARGE_WEIGHT and _is_row(bias, width)


def _is_row(bias: fx.Node | None, width: int) -> bool:
    if bias is None:
        return True
    value: Any = bias.meta["val"]
    return value.dtype is torch.float32 and tuple(value.size()) == (width,)
