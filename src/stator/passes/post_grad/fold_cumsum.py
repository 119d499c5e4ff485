"""Running sums of one number are its multiples."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.rules import why_not_same
from stator.graph.run import Ctx
from stator.graph.sharing import Sharing

aten = torch.ops.aten

UNIFORM: Final = frozenset({aten.full.default, aten.ones.default, aten.zeros.default})


def fold_cumsum(graph: fx.Graph, ctx: Ctx) -> int:
    """Multiply instead of adding one by one; return how many sums are gone.

    before: x = full([2, 3], 5);  y = cumsum(x, 1)
    after:  x = full([2, 3], 5);  y = (arange(3) + 1) * x

    Only for whole numbers, where both wrap around alike: sums of floats round at every step.
    """
    found = graph.find_nodes(op="call_function", target=aten.cumsum.default)
    sharing = Sharing(graph) if found else None
    folded = 0
    for node in found:
        source = node.args[0]
        if source.target not in UNIFORM or not _is_exact(node, source):
            continue
        assert sharing is not None, "there is a sum"
        if sharing.is_written(source):
            continue
        builder = Builder(graph, node)
        new = _multiples(builder, node, source)
        if why_not_same(node, new) or not ctx.fuel.spend(f"fold_cumsum: {node.name}"):
            builder.take_back()
            continue
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        folded += 1
    return folded


def _is_exact(node: fx.Node, source: fx.Node) -> bool:
    values = (node.meta["val"], source.meta["val"])
    whole = all(not v.dtype.is_floating_point and not v.dtype.is_complex for v in values)
    return whole and values[0].dim() > 0 and node.meta["val"].dtype != torch.bool


def _multiples(builder: Builder, node: fx.Node, source: fx.Node) -> Any:
    value = node.meta["val"]
    dim = node.args[1] % value.dim()
    count = source.args[0][dim]  # a number, or the node of a symbolic size
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    numbers = builder.call(aten.arange.default, count, **options)

    def multiply(numbers: Any, number: Any) -> Any:
        steps = aten.add.Tensor(numbers, 1)
        for _ in range(dim + 1, value.dim()):
            steps = aten.unsqueeze.default(steps, -1)
        return aten.mul.Tensor(steps, number)

    return builder.run(multiply, numbers, source)
