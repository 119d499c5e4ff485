"""The cut is the cheapest there is: held against all others on random joint graphs."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest
import torch
from torch import fx

from stator.aot.partition.network import Network
from stator.aot.partition.weigh import NEVER, Weight
from stator.errors import CompileError

GRAPHS = 300
MOST_VALUES = 9


def random_network(seed: int) -> Network:
    """Inputs, values computed from earlier ones, and a few that the backward reads."""
    draw = random.Random(seed)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    weights: dict[fx.Node, Weight] = {}
    for i in range(draw.randint(1, 3)):
        nodes.append(graph.placeholder(f"x{i}"))
        weights[nodes[-1]] = Weight(0, draw.choice([0, 3, 10]), NEVER)
    for _ in range(draw.randint(1, MOST_VALUES - len(nodes))):
        sources = draw.sample(nodes, min(len(nodes), draw.randint(1, 3)))
        nodes.append(graph.call_function(torch.add, tuple(sources)))
        keep = draw.choice([NEVER, *range(20)]) if draw.random() < 0.3 else draw.randint(1, 40)
        again = NEVER if draw.random() < 0.2 and keep != NEVER else draw.randint(0, 25)
        weights[nodes[-1]] = Weight(draw.randint(0, 30), keep, again)
    demanded = draw.sample(nodes, draw.randint(1, len(nodes)))
    graph.output(tuple(demanded))
    return Network(nodes, frozenset(demanded), weights)


def cost_of_keeping(network: Network, kept: frozenset[fx.Node], per_byte: float) -> float:
    """What it costs to keep exactly `kept`, and to compute the rest again; NEVER if impossible."""
    cost = sum(network.weights[node].price(per_byte) for node in kept)
    pending, again = list(network.demanded), set()
    while pending:
        node = pending.pop()
        if node not in kept and node not in again:
            again.add(node)
            cost += network.weights[node].again
            pending += node.all_input_nodes
    return cost


@pytest.mark.parametrize("per_byte", [0, 1, 5])
def test_no_other_cut_is_cheaper(per_byte: float) -> None:
    feasible = 0
    for seed in range(GRAPHS):
        network = random_network(seed)
        subsets = chain.from_iterable(
            combinations(network.nodes, size) for size in range(len(network.nodes) + 1)
        )
        best = min(cost_of_keeping(network, frozenset(kept), per_byte) for kept in subsets)
        if best == NEVER:
            with pytest.raises(CompileError, match="nothing can be kept"):
                network.cut(lambda _, weight: weight.price(per_byte))
            continue
        feasible += 1

        cut = network.cut(lambda _, weight: weight.price(per_byte))

        assert cut.cost == best, f"seed {seed}"
        assert cost_of_keeping(network, frozenset(cut.kept), per_byte) == best, f"seed {seed}"
    assert feasible > GRAPHS / 2, "few graphs can be cut at all"


def test_of_two_cheapest_cuts_the_one_that_computes_less_is_taken() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    weights = {x: Weight(0, 8, NEVER), y: Weight(8, 8, 0)}

    cut = Network([x, y], {y}, weights).cut(lambda _, weight: weight.keep)

    assert cut.kept == (y,)
    assert not cut.again


def test_the_way_that_cannot_be_cut_is_named() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    noise = graph.call_function(torch.rand_like, (x,), name="noise")
    seen = graph.call_function(torch.sin, (noise,), name="seen")
    weights = {
        x: Weight(0, 8, NEVER),
        noise: Weight(8, NEVER, NEVER, "asked for: recompute"),
        seen: Weight(8, NEVER, 4),
    }

    with pytest.raises(CompileError, match=r"noise \(asked for: recompute\) -> seen"):
        Network([x, noise, seen], {seen}, weights).cut(lambda _, weight: weight.keep)


def test_costs_beyond_32_bits_are_scaled() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    z = graph.call_function(torch.cos, (y,))
    large = 1 << 40
    weights = {x: Weight(0, 3 * large, NEVER), y: Weight(0, large, large), z: Weight(0, NEVER, 5)}

    cut = Network([x, y, z], {z}, weights).cut(lambda _, weight: weight.keep)

    assert cut.kept == (y,)
