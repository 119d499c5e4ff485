"""What the backward gets from the forward: the cheapest cut at a price for memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.weigh import NEVER, Scales
from stator.graph.edit import needed_by

AGGRESSIVE: Final = 8.0  # all that our kernels compute is computed again; products are kept


def network_of(joint: Joint, classes: Classes, scales: Scales) -> Network:
    """Forward values that the backward depends on, weighed."""
    demanded = classes.demanded(joint)
    behind = needed_by(demanded)
    nodes = [node for node in joint.graph.nodes if node in behind]
    weights = {node: scales.weigh(node) for node in nodes}
    return Network(nodes, frozenset(demanded), weights, scales.work)


def cut_at(network: Network, price: float) -> Cut:
    """The cheapest cut where every byte costs the same."""
    return network.cut_at(price)


def save_everything(network: Network) -> Cut:
    """Only what costs nothing is computed again: what eager would keep is kept."""
    costs = network.costs
    free = np.isinf(costs.keep) | (costs.again == 0)
    return network.cut_where(costs.keep, np.where(free, costs.again, NEVER))


def cut_keeping(network: Network, kept: Collection[fx.Node], price: float) -> Cut:
    """The cheapest cut that keeps some values in any case."""
    return network.cut_at(price, frozenset(kept))
