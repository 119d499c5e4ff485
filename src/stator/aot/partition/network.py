"""The cheapest way to have forward values in the backward, as a minimum cut.

Every forward value is an edge from its making to its use.  To cut that edge is to keep the value,
for the price of keeping it.  To cut the edge from the source to its making is to compute it again,
for what that costs, provided that all it is computed from is there.

    source --again--> making --keep--> use --∞--> making of what reads it
                                           --∞--> sink, if the backward reads it

Of several cheapest cuts the one nearest to the backward is taken: it computes least again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
from torch import fx

from stator.aot.partition.weigh import Weight
from stator.errors import CompileError

SOURCE: Final = 0
SINK: Final = 1
MOST: Final = (1 << 30) - 1  # of all finite capacities: the solver counts in 32 bits
ENDLESS: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of the forward, and what is computed again, in order."""

    kept: tuple[fx.Node, ...]
    again: frozenset[fx.Node]
    cost: int  # in bytes of traffic, prices of memory included
    # Values that the backward computes before all else, from what is kept, to compute the rest from
    # them when it is needed: all else on the way to them is computed twice, and lives shortly.
    relays: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """Forward values that the backward depends on, with what they cost."""

    nodes: Sequence[fx.Node]  # in order: those that something the backward reads is made from
    demanded: Collection[fx.Node]  # those that it reads
    weights: dict[fx.Node, Weight]
    ends: list[Any] = field(default_factory=list, repr=False)  # of edges: the same for every cut

    def cut(self, price: Callable[[fx.Node, Weight], float]) -> Cut:
        """The cheapest cut, where `price` says what keeping a value costs."""
        if not self.nodes:
            return Cut((), frozenset(), 0)
        keep = [price(node, self.weights[node]) for node in self.nodes]
        again = [self.weights[node].again for node in self.nodes]
        near_sink = self._sink_side(keep, again)
        kept, repeated, cost = [], set(), 0.0
        for i, node in enumerate(self.nodes):
            if near_sink[_making(i)]:
                repeated.add(node)
                cost += again[i]
            elif near_sink[_use(i)]:
                kept.append(node)
                cost += keep[i]
        return Cut(tuple(kept), frozenset(repeated), round(cost))

    def with_weights(self, weights: dict[fx.Node, Weight]) -> Network:
        """The same values with other costs."""
        return Network(self.nodes, self.demanded, weights, self.ends)

    def edges(self, keep: list[float], again: list[float]) -> tuple[Any, Any, Any]:
        """Tails, heads and capacities, in units that the solver can count."""
        if not self.ends:
            self.ends.extend(self._ends())
        costs = np.array([again, keep])
        endless = np.isinf(costs)
        unit = max(1.0, float(costs[~endless].sum()) / MOST)
        finite = np.ceil(np.where(endless, 0, costs) / unit)
        tails, heads = self.ends
        capacities = np.full(len(tails), ENDLESS, dtype=np.int32)
        capacities[: costs.size] = np.where(endless, ENDLESS, finite).astype(np.int32).ravel()
        return tails, heads, capacities

    def _ends(self) -> Any:
        """Edges to make and to keep each value, then those that are never cut."""
        count = len(self.nodes)
        place = {node: i for i, node in enumerate(self.nodes)}
        tails = [SOURCE] * count + [_making(i) for i in range(count)]
        heads = [_making(i) for i in range(count)] + [_use(i) for i in range(count)]
        for i, node in enumerate(self.nodes):
            readers = [_making(place[reader]) for reader in node.users if reader in place]
            readers += [SINK] if node in self.demanded else []
            tails += [_use(i)] * len(readers)
            heads += readers
        return np.array(tails), np.array(heads)

    def _sink_side(self, keep: list[float], again: list[float]) -> Any:
        """Which vertices can still reach the sink when as much flows as can."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = 2 * len(self.nodes) + 2
        tails, heads, capacities = self.edges(keep, again)
        room = csr_array((capacities, (tails, heads)), shape=(count, count))
        found = maximum_flow(room, SOURCE, SINK)
        if found.flow_value > MOST + len(tails):  # more than all finite edges have room for
            self._explain((tails, heads, capacities))
        left = (room - found.flow).astype(np.int64)
        left.data = (left.data > 0).astype(np.int8)
        left.eliminate_zeros()
        reached = breadth_first_order(left.T.tocsr(), SINK, return_predecessors=False)
        near_sink = np.zeros(count, dtype=bool)
        near_sink[reached] = True
        return near_sink

    def _explain(self, edges: tuple[Any, Any, Any]) -> NoReturn:
        """Raise an error that names a path on which nothing can be kept nor computed again."""
        tails, heads, capacities = edges
        onward: dict[int, list[int]] = {}
        for tail, head, room in zip(tails, heads, capacities, strict=True):
            if room == ENDLESS:
                onward.setdefault(int(tail), []).append(int(head))
        came = {SOURCE: SOURCE}
        queue = deque([SOURCE])
        while queue and SINK not in came:
            here = queue.popleft()
            for there in onward.get(here, ()):
                if there not in came:
                    came[there] = here
                    queue.append(there)
        path, here = [], came[SINK]
        while here != SOURCE:
            node = self.nodes[(here - 2) // 2]
            if node not in path:
                path.append(node)
            here = came[here]
        steps = " -> ".join(
            f"{node.name} ({self.weights[node].why or node.target})" for node in reversed(path)
        )
        raise CompileError(
            "partition",
            f"the backward cannot have {path[0].name}: on the way {steps} nothing can be kept, "
            "and the first cannot be computed again",
            hint="a policy or a checkpoint tag forbids to save what cannot be recomputed; "
            "allow to save one of them",
        )


def _making(i: int) -> int:
    return 2 * i + 2


def _use(i: int) -> int:
    return 2 * i + 3
