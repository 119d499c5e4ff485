"""Dropout that draws no random number, as eager decides it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from stator.graph.run import Ctx


def settle_dropout(graph: fx.Graph, ctx: Ctx) -> int:
    """Replace dropout that keeps everything, or nothing; return how many.

    before: y = dropout(x, 0.5, training=False)   or   y = dropout(x, 0.0)
    after:  y is x

    before: y = dropout(x, 1.0)
    after:  y = x * 0

    Below the level of torch functions both would draw numbers that eager leaves undrawn.
    """
    settled = 0
    for node in graph.find_nodes(op="call_function", target=F.dropout):
        x, p, training, inplace = dropout_arguments(*node.args, **node.kwargs)
        if inplace or not isinstance(p, int | float) or not isinstance(training, bool):
            continue
        if (training and 0 < p < 1) or not ctx.fuel.spend(node.name):
            continue
        replacement = x
        if training and p == 1:
            with graph.inserting_before(node):
                replacement = graph.call_function(torch.mul, (x, 0))
            replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        settled += 1
    return settled


def dropout_arguments(
    input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False
) -> tuple[Any, Any, Any, Any]:
    """The arguments of a call of dropout, however they are given."""
    return input, p, training, inplace
