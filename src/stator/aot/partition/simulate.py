"""What a step under some cut would hold in memory, and how long it would take: before it is built.

The forward runs in the order of the joint graph, the backward as order.py says.  A tensor lives
from the node that makes it to its last reader; a view keeps its base alive; what kernels make and
read between two library calls is never in memory.  Inputs, and values that the caller got, live
throughout.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.order import backward_order, forward_nodes
from stator.aot.partition.weigh import bytes_of, is_generated, readers, work_of
from stator.ops.table import POINTWISE
from stator.torch_api import is_view_op

SMALL: Final = 1024  # bytes of a value that is not worth a thought

Run = tuple[fx.Node, bool]  # a node, and whether this is its first run of two


@dataclass(frozen=True, slots=True)
class Simulated:
    """One cut, foreseen."""

    peak: int  # bytes
    holders: tuple[tuple[str, int], ...]  # what is alive then: names and bytes, largest first


@dataclass(frozen=True, slots=True)
class Simulator:
    """A joint graph, set up for many cuts."""

    joint: Joint
    classes: Classes
    network: Network
    sizes: dict[fx.Node, int] = field(default_factory=dict)  # bytes of what has memory of its own
    brief: set[fx.Node] = field(default_factory=set)  # values that only kernels make and read
    # What every cut asks of every node, found once.
    sources: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    called: set[fx.Node] = field(default_factory=set)  # by libraries

    def __post_init__(self) -> None:
        for node in self.joint.graph.nodes:
            self.sources[node] = node.all_input_nodes
            if not is_generated(node):
                self.called.add(node)
            if _is_made(node):
                self.sizes[node] = bytes_of(node.meta.get("val"))
                if _is_brief(node):
                    self.brief.add(node)

    def peak(self, cut: Cut) -> Simulated:
        """The most that a step holds."""
        steady = {node: bytes_of(node.meta.get("val")) for node in self.joint.primals}
        order = [node for node in self.joint.graph.nodes if node.op == "call_function"]
        ahead = forward_nodes(self.classes, cut)
        wanted = [node for node in self.joint.values if isinstance(node, fx.Node)]
        wanted += [new for _, new in self.joint.updates if isinstance(new, fx.Node)]
        runs = [(node, False) for node in order if node in ahead]
        forward = _Half(runs, self.joint.primals, self)
        first = forward.peak([*wanted, *cut.kept])
        held = {forward.base(node) for node in wanted} - set(steady)
        steady |= {node: bytes_of(node.meta.get("val")) for node in held}
        kept = [forward.base(node) for node in cut.kept]
        given = [
            node for node in dict.fromkeys((*kept, *self.joint.tangents)) if node not in steady
        ]
        grads = [grad for grad in self.joint.grads if isinstance(grad, fx.Node)]
        runs = self.order(cut)
        half = _Half(runs, [*given, *steady], self)
        second = half.peak(grads, given)
        base = sum(steady.values())
        at_first = base - sum(bytes_of(node.meta.get("val")) for node in held)
        if at_first + first.peak > base + second.peak:
            return _with_inputs(first, at_first)
        return _with_inputs(second, base)

    def order(self, cut: Cut) -> list[Run]:
        """What the backward runs."""
        return list(backward_order(self.joint, self.classes, cut, self.sources.__getitem__))

    def separators(self) -> list[fx.Node]:
        """Values that, once they are made, are all that the rest of the forward reads of what was.

        Between two of them a program can be computed again from the first alone.
        """
        order = [node for node in self.joint.graph.nodes if node in self.classes.forward]
        half = _Half([(node, False) for node in order], self.joint.primals, self)
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(order):
            last.update({half.base(source): place for source in node.all_input_nodes})
        found: dict[fx.Node, None] = {}
        alive: set[fx.Node] = set()
        for place, node in enumerate(order):
            if self.sizes.get(node, 0) > SMALL and last.get(node, -1) > place:
                alive.add(node)
            alive = {value for value in alive if last[value] > place}
            if len(alive) == 1:
                found[next(iter(alive))] = None
        return [node for node in found if node in self.network.weights]

    def saved(self, cut: Cut) -> int:
        """Bytes that the backward gets of the forward, inputs aside that are there anyway."""
        weights = self.network.weights
        given = sum(weights[node].bytes for node in cut.kept if node.op == "placeholder")
        made = [node for node in cut.kept if node.op != "placeholder"]
        return given + sum(bytes_of(node.meta.get("val")) for node in made)

    def extra(self, cut: Cut) -> float:
        """What keeping and computing again costs, in bytes of traffic."""
        weights = self.network.weights
        twice = [node for node, early in self.order(cut) if early] if cut.relays else []
        return (
            sum(weights[node].keep for node in cut.kept)
            + sum(weights[node].again for node in cut.again)
            + sum(work_of(node) for node in twice)
        )

    def base(self) -> float:
        """What a step costs in any case."""
        nodes = [*self.classes.forward, *self.classes.backward]
        moved = sum(2 * self.sizes.get(node, 0) for node in nodes if node not in self.brief)
        return moved + sum(work_of(node) for node in nodes)


def _with_inputs(found: Simulated, steady: int) -> Simulated:
    holders = (("inputs and outputs of the program", steady), *found.holders)
    return Simulated(found.peak + steady, tuple(sorted(holders, key=lambda held: -held[1])))


class _Half:
    """Nodes in order, and which memory each of them is."""

    def __init__(self, runs: Sequence[Run], given: Iterable[fx.Node], simulator: Simulator) -> None:
        self.runs = runs
        self.simulator = simulator
        self.given = frozenset(given)
        self._bases: dict[fx.Node, fx.Node] = {}

    def base(self, node: fx.Node) -> fx.Node:
        """What the node is a view of, down to what is given."""
        found = self._bases.get(node)
        if found is None:
            is_view = node not in self.given and node.op == "call_function"
            is_view = is_view and is_view_op(node.target) and bool(node.all_input_nodes)
            found = self._bases[node] = self.base(node.all_input_nodes[0]) if is_view else node
        return found

    def peak(self, wanted: Iterable[fx.Node], owned: Iterable[fx.Node] = ()) -> Simulated:
        """The most that is alive, where `wanted` outlive the half, and `owned` die in it."""
        last: dict[Run, int] = {}
        rounds: dict[fx.Node, bool] = {}  # whether what is there is from a first run
        for place, (node, early) in enumerate(self.runs):
            for source in self.simulator.sources[node]:
                memory = self.base(source)
                last[memory, rounds.get(memory, False)] = place
            rounds[node] = early
        for memory in map(self.base, wanted):
            last[memory, rounds.get(memory, False)] = len(self.runs)
        alive: dict[Run, int] = {(node, False): bytes_of(node.meta.get("val")) for node in owned}
        return self._walk(alive, last)

    def _walk(self, alive: dict[Run, int], last: dict[Run, int]) -> Simulated:
        dying: dict[int, list[Run]] = {}
        for run, place in last.items():
            dying.setdefault(place, []).append(run)
        called = self.simulator.called
        calls = list(accumulate(int(node in called) for node, _ in self.runs))
        calls.append(len(calls) + 1)  # behind the last
        held = most = sum(alive.values())
        snapshot = dict(alive)
        for place, (node, early) in enumerate(self.runs):
            gone = dying.get(place, [])
            if node.target in POINTWISE:  # it may write where it reads
                held -= sum(alive.pop(run, 0) for run in gone)
            size = self.simulator.sizes.get(node, 0)
            # Until the next library call, what kernels make for kernels stays within them.
            inside = calls[last.get((node, early), place)] == calls[place]
            if size and node not in self.given and not (inside and node in self.simulator.brief):
                alive[node, early] = size
                held += size
            if held > most:
                most, snapshot = held, dict(alive)
            held -= sum(alive.pop(run, 0) for run in gone)
        largest = sorted(snapshot.items(), key=lambda item: -item[1])
        return Simulated(most, tuple((run[0].name, size) for run, size in largest))


def _is_made(node: fx.Node) -> bool:
    """Whether the node has memory of its own."""
    return isinstance(node.meta.get("val"), torch.Tensor) and not (
        is_view_op(node.target) or node.op != "call_function"
    )


def _is_brief(node: fx.Node) -> bool:
    """Whether kernels alone make and read the value, so that it need not be in memory."""
    if node.target is operator.getitem or not is_generated(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    return all(is_generated(reader) for reader in readers(node))
