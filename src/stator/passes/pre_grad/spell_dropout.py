"""Dropout as eager computes it, for eager's own bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from stator.graph.run import Ctx
from stator.passes.pre_grad.settle_dropout import dropout_arguments


def spell_dropout(graph: fx.Graph, ctx: Ctx) -> int:
    """Write dropout out in eager's steps where `Options.numerics` asks for its bits.

    before: y = dropout(x, 0.25)
    after:  noise = empty_like(x);  noise.bernoulli_(0.75);  noise.div_(0.75);  y = x * noise

    Traced with symbolic sizes it would become an operator that rounds otherwise.
    """
    if not ctx.options.has_eager_bits:
        return 0
    spelled = 0
    for node in graph.find_nodes(op="call_function", target=F.dropout):
        x, p, training, inplace = dropout_arguments(*node.args, **node.kwargs)
        if not isinstance(p, int | float) or training is not True or not 0 < p < 1:
            continue
        if not ctx.fuel.spend(f"spell_dropout: {node.name}"):
            continue
        with graph.inserting_before(node):
            noise = graph.call_function(torch.empty_like, (x,))
            drawn = graph.call_method("bernoulli_", (noise, 1 - p))
            scaled = graph.call_method("div_", (drawn, 1 - p))
            product = torch.Tensor.mul_ if inplace else torch.mul
            result = graph.call_function(product, (x, scaled))
        for made in (noise, drawn, scaled, result):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        spelled += 1
    return spelled
