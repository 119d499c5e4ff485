"""Graphs of any number of nodes, made of what models are made of; the same from the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

ROWS: Final = 8
COLUMNS: Final = 16
INPUTS: Final = 4
OUTPUTS: Final = 10
RECENT: Final = 24  # values that a new node may read: as in a model, mostly what is near

Call = Callable[..., fx.Node]
Part = Callable[[Call, fx.Node, fx.Node, fx.Node], fx.Node]


def _half_and_half(call: Call, x: fx.Node, y: fx.Node, w: fx.Node) -> fx.Node:
    left = call(aten.slice.Tensor, x, 1, 0, COLUMNS // 2)
    right = call(aten.slice.Tensor, y, 1, COLUMNS // 2, COLUMNS)
    return call(aten.cat.default, [right, left], 1)


def _centred(call: Call, x: fx.Node, y: fx.Node, w: fx.Node) -> fx.Node:
    return call(aten.sub.Tensor, x, call(aten.mean.dim, x, [1], True))


def _chosen(call: Call, x: fx.Node, y: fx.Node, w: fx.Node) -> fx.Node:
    return call(aten.where.self, call(aten.gt.Scalar, x, 0.1), x, y)


def _chain(*targets: Any) -> Part:
    """One unary operator after another."""

    def part(call: Call, x: fx.Node, y: fx.Node, w: fx.Node) -> fx.Node:
        for target in targets:
            x = call(target, x)
        return x

    return part


def _pair(target: Any, *before: Any) -> Part:
    """A binary operator, whose second argument went through others."""

    def part(call: Call, x: fx.Node, y: fx.Node, w: fx.Node) -> fx.Node:
        return call(target, x, _chain(*before)(call, y, x, w))

    return part


PARTS: Final[tuple[Part, ...]] = (
    _chain(aten.sin.default),
    _chain(aten.cos.default),
    _chain(aten.tanh.default),
    _chain(aten.sigmoid.default),
    _chain(aten.tanh.default, aten.exp.default),
    _chain(aten.neg.default, aten.sin.default),
    _chain(aten.neg.default, aten.neg.default),
    _chain(aten.relu.default, aten.relu.default),
    _chain(aten.neg.default, aten.abs.default),
    _chain(aten.relu.default, aten.neg.default),
    _pair(aten.add.Tensor),
    _pair(aten.sub.Tensor),
    _pair(aten.mul.Tensor),
    _pair(aten.maximum.default),
    _pair(aten.sub.Tensor, aten.neg.default),
    _pair(aten.add.Tensor, aten.neg.default),
    lambda call, x, y, w: call(aten.sub.Tensor, call(aten.sigmoid.default, x), y),
    lambda call, x, y, w: call(aten.mul.Tensor, call(aten.sigmoid.default, x), y),
    lambda call, x, y, w: call(aten.abs.default, call(aten.maximum.default, x, y)),
    lambda call, x, y, w: call(aten._softmax.default, x, 1, False),
    lambda call, x, y, w: call(aten.tanh.default, call(aten.mm.default, x, w)),
    _half_and_half,
    _centred,
    _chosen,
)


def make_graph(count: int, seed: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph with at least `count` nodes that compute, and inputs for it."""
    chance = random.Random(seed)
    graph = fx.Graph()
    live = [graph.placeholder(f"x{number}") for number in range(INPUTS)]
    weight = graph.placeholder("weight")
    made = 0

    def call(target: Any, *args: Any) -> fx.Node:
        nonlocal made
        made += 1
        return graph.call_function(target, args)

    parts = list(PARTS)
    chance.shuffle(parts)
    while made < count:
        part = parts[made % len(parts)] if made < len(parts) else chance.choice(parts)
        x, y = (chance.choice(live[-RECENT:]) for _ in range(2))
        value = part(call, x, y, weight)
        if chance.random() < 0.3:  # or numbers would grow without end
            value = call(aten.sin.default, value)
        live.append(value)
    # The last of each operator too, so that what goes wrong can be seen.
    last = {node.target: node for node in graph.nodes if node.op == "call_function"}
    graph.output(tuple(dict.fromkeys([*live[-OUTPUTS:], *last.values()])))
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(INPUTS)]
    inputs.append(torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5)
    return fx.GraphModule(torch.nn.Module(), graph), inputs
