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
from itertools import compress
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
    copied: frozenset[fx.Node] = frozenset()  # of what is kept: inputs, of which copies are


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of all values of a network, in their order."""

    bytes: Any
    keep: Any
    again: Any


@dataclass(frozen=True, slots=True)
class Edges:
    """A network's edges and their reverses, by tail and head: the same for every cut."""

    matrix: Any  # of which each cut fills the capacities in
    owns: Any  # where in it the edges of the network are, in their order
    reverse: Any  # and where the reverse of each is


@dataclass(frozen=True, slots=True)
class Network:
    """Forward values that the backward depends on, with what they cost."""

    nodes: Sequence[fx.Node]  # in order: those that something the backward reads is made from
    demanded: Collection[fx.Node]  # those that it reads
    weights: dict[fx.Node, Weight]
    work: dict[fx.Node, float] = field(default_factory=dict, repr=False)  # as far as it was needed
    made: list[Any] = field(default_factory=list, repr=False)  # costs and edges, once asked for

    def cut(self, price: Callable[[fx.Node, Weight], float]) -> Cut:
        """The cheapest cut, where `price` says what keeping a value costs."""
        keep = [price(node, self.weights[node]) for node in self.nodes]
        return self.cut_where(np.array(keep, dtype=float), self.costs.again)

    def cut_at(self, price: Any, kept: Collection[fx.Node] = ()) -> Cut:
        """The cheapest cut where a byte costs `price`, or one each; `kept` is in any case."""
        costs = self.costs
        keep, again = costs.keep + price * costs.bytes, costs.again
        if kept:
            chosen = np.array([node in kept for node in self.nodes], dtype=bool)
            keep, again = np.where(chosen, 0, keep), np.where(chosen, np.inf, again)
        return self.cut_where(keep, again)

    def cut_where(self, keep: Any, again: Any) -> Cut:
        """The cheapest cut, where each value costs so much to keep, and to compute again."""
        if not self.nodes:
            return Cut((), frozenset(), 0)
        near_sink = self._sink_side(keep, again)
        repeated = near_sink[2::2]
        kept = near_sink[3::2] & ~repeated
        cost = keep[kept].sum() + again[repeated].sum()
        chosen = tuple(compress(self.nodes, kept))
        return Cut(
            chosen,
            frozenset(compress(self.nodes, repeated)),
            round(cost),
            copied=frozenset(node for node in chosen if self.weights[node].is_copied),
        )

    @property
    def costs(self) -> Costs:
        """The weights as arrays."""
        return self._made()[0]

    def _made(self) -> tuple[Costs, Edges, Any]:
        if not self.made:
            weights = [self.weights[node] for node in self.nodes]
            columns = [(one.bytes, one.keep, one.again) for one in weights]
            costs = Costs(*np.array(columns, dtype=float).reshape(-1, 3).T)
            ends = self._ends()
            self.made.extend((costs, _edges(ends, 2 * len(weights) + 2), ends))
        costs, edges, ends = self.made
        return costs, edges, ends

    def _capacities(self, keep: Any, again: Any, count: int) -> Any:
        """What each of `count` edges has room for, in units that the solver can count."""
        costs = np.concatenate([again, keep])
        endless = np.isinf(costs)
        unit = max(1.0, float(costs[~endless].sum()) / MOST)
        finite = np.ceil(np.where(endless, 0, costs) / unit)
        capacities = np.full(count, ENDLESS, dtype=np.int32)
        capacities[: costs.size] = np.where(endless, ENDLESS, finite).astype(np.int32)
        return capacities

    def _ends(self) -> tuple[Any, Any]:
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
        return np.array(tails, dtype=np.int32), np.array(heads, dtype=np.int32)

    def _sink_side(self, keep: Any, again: Any) -> Any:
        """Which vertices can still reach the sink when as much flows as can."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        _, edges, ends = self._made()
        capacities = self._capacities(keep, again, len(ends[0]))
        room = edges.matrix.copy()
        room.data[edges.owns] = capacities
        found = maximum_flow(room, SOURCE, SINK)
        if found.flow_value > MOST + len(capacities):  # more than all finite edges have room for
            self._explain((*ends, capacities))
        # Backwards from the sink along edges with room left; a flow is its reverse's, negative.
        left = room.data.astype(np.int64) - found.flow.data > 0
        backwards = csr_array(
            (left[edges.reverse].astype(np.int8), room.indices, room.indptr), shape=room.shape
        )
        backwards.eliminate_zeros()
        reached = breadth_first_order(backwards, SINK, return_predecessors=False)
        near_sink = np.zeros(room.shape[0], dtype=bool)
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


def _edges(ends: tuple[Any, Any], count: int) -> Edges:
    """Edges and their reverses, sorted, with no room yet."""
    from scipy.sparse import csr_array

    tails, heads = (end.astype(np.int64) for end in ends)
    own, back = tails * count + heads, heads * count + tails
    order = np.unique(np.concatenate([own, back]))
    rows, columns = np.divmod(order, count)
    starts = np.searchsorted(rows, np.arange(count + 1)).astype(np.int32)
    nothing = np.zeros(len(order), dtype=np.int32)
    matrix = csr_array((nothing, columns.astype(np.int32), starts), shape=(count, count))
    return Edges(
        matrix, np.searchsorted(order, own), np.searchsorted(order, columns * count + rows)
    )


def _making(i: int) -> int:
    return 2 * i + 2


def _use(i: int) -> int:
    return 2 * i + 3
