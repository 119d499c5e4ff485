"""Dropout as eager computes it, for eager's own bits."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from stator.graph.run import Ctx
from stator.passes.pre_grad.settle_dropout import dropout_arguments


def spell_dropout(graph: fx.Graph, ctx: Ctx) -> int:
    """Write dropout out in eager's steps: for its bits, and in place for its random numbers.

    before: y = dropout(x, 0.25)
    after:  _, mask = native_dropout(x, 0.25, True);  y = x * mask.type_as(x).div(0.75)

    Traced with symbolic sizes it would become an operator that rounds otherwise.  With plain ones
    it would draw its mask in place, and functionalization would forget how that lies in memory: by
    that order eager draws.
    """
    if not ctx.options.draws_as_eager:
        return 0
    spelled = 0
    for node in graph.find_nodes(op="call_function", target=F.dropout):
        x, p, training, inplace = dropout_arguments(*node.args, **node.kwargs)
        if not inplace and not ctx.options.has_eager_bits:
            continue
        if not isinstance(p, int | float) or training is not True or not 0 < p < 1:
            continue
        if not ctx.fuel.spend(f"spell_dropout: {node.name}"):
            continue
        with graph.inserting_before(node):
            drawn = graph.call_function(torch.native_dropout, (x, p, True))
            mask = graph.call_function(operator.getitem, (drawn, 1))
            noise = graph.call_method("type_as", (mask, x))
            scaled = graph.call_method("div", (noise, 1 - p))
            product = torch.Tensor.mul_ if inplace else torch.mul
            result = graph.call_function(product, (x, scaled))
        for made in (drawn, mask, noise, scaled, result):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        spelled += 1
    return spelled
