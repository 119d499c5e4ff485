"""What a step under some cut would hold in memory, and how long it would take: before it is built.

The forward runs in the order of the joint graph, the backward as order.py says.  A tensor lives
from the node that makes it to its last reader; a view keeps its base alive; what kernels make and
read between two library calls is never in memory.  Inputs, and values that the caller got, live
throughout.

Memory comes from three places, and none gives to another: the arena of each half for what is small,
the pool for what is large or outlives it, and torch for results of libraries.  The peak is the sum
of their highest marks.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.order import backward_order
from stator.aot.partition.weigh import bytes_of, is_generated, readers, work_of
from stator.core.events import LARGE
from stator.ops.table import POINTWISE
from stator.torch_api import is_view_op

aten = torch.ops.aten

SMALL: Final = 1024  # bytes of a value that is not worth a thought
ARENA, POOL, TORCH = range(3)
INTO_MEMORY: Final = frozenset(  # libraries that write where they are told
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
)

IN_ROWS: Final = frozenset(  # kernels that read a row before they write it, as large, in its place
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    }
)

Run = tuple[fx.Node, bool]  # a node, and whether this is its first run of two


@dataclass(frozen=True, slots=True)
class Fact:
    """What every cut asks of a node."""

    number: int
    base: int  # the node whose memory it is
    reads: tuple[int, ...]  # such nodes
    value: int  # its bytes
    bytes: int  # of memory of its own; 0: none
    brief: bool  # only kernels make and read it
    is_call: bool  # of a library
    stores_over: bool  # a kernel that may write where it reads
    by_torch: bool  # a library makes the memory


class Span(NamedTuple):
    """Memory of a value, while a half runs."""

    node: int
    place: int
    bytes: int
    first: int
    end: int  # the first step that it is not there any more


class Half(NamedTuple):
    """A forward or a backward, foreseen."""

    spans: list[Span]
    steps: int

    def held(self, place: int) -> list[int]:
        """Bytes of a place, step by step."""
        changes = [0] * (self.steps + 2)
        for _, home, size, first, end in self.spans:
            if home == place:
                changes[first] += size
                changes[end] -= size
        return list(accumulate(changes))

    def most(self, place: int) -> int:
        """The most bytes of a place."""
        return max(self.held(place))

    def at_most(self, place: int) -> list[Span]:
        """What is alive then."""
        held = self.held(place)
        when = held.index(max(held))
        return [one for one in self.spans if one.place == place and one.first <= when < one.end]


@dataclass(slots=True)
class Simulator:
    """A joint graph, set up for many cuts: what all ask of every node is found once."""

    joint: Joint
    classes: Classes
    network: Network
    sizes: dict[fx.Node, int] = field(default_factory=dict)  # bytes of what has memory of its own
    brief: set[fx.Node] = field(default_factory=set)  # values that only kernels make and read
    sources: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)  # by the number of a node
    number: dict[fx.Node, int] = field(default_factory=dict)
    bases: list[int] = field(default_factory=list)  # numbers of nodes that are no views
    work: dict[fx.Node, float] = field(default_factory=dict)
    # What is the same for every cut:
    inputs: frozenset[int] = field(init=False)
    returned: frozenset[int] = field(init=False)  # what the forward makes that the caller gets
    steady: int = field(init=False)  # bytes of the inputs
    outputs: int = field(init=False)  # and of the outputs
    own: frozenset[fx.Node] = field(init=False)  # what the forward computes in any case
    tangents: frozenset[int] = field(init=False)  # which others may hold

    def __post_init__(self) -> None:
        for number, node in enumerate(self.joint.graph.nodes):
            self.nodes.append(node)
            self.number[node] = number
            self.sources[node] = node.all_input_nodes
            shown = _shown(node)
            base = number if shown is None else self.facts[self.number[shown]].base
            reads = {self.facts[self.number[source]].base for source in self.sources[node]}
            self.bases += [number] if base == number else []
            size = bytes_of(node.meta.get("val"))
            made = size if _is_made(node) else 0
            brief = bool(made) and _is_brief(node)
            if _is_made(node):
                self.sizes[node] = made
                self.brief.update([node] if brief else [])
            called = not is_generated(node)
            over = node.target in POINTWISE or node.target in IN_ROWS
            by_torch = called and not _is_told_where(node)
            self.facts.append(
                Fact(number, base, tuple(reads), size, made, brief, called, over, by_torch)
            )
        joint = self.joint
        values = (*joint.values, *(new for _, new in joint.updates))
        self.inputs = frozenset(self._bases(joint.primals))
        self.tangents = frozenset(self._bases(joint.tangents))
        made_values = self._bases(node for node in values if isinstance(node, fx.Node))
        self.returned = frozenset(made_values) - self.inputs
        self.steady = sum(bytes_of(node.meta.get("val")) for node in joint.primals)
        self.outputs = self._bytes(self.returned)
        self.own = frozenset(n for n in self.classes.forward if n.op == "call_function")

    def peak(self, cut: Cut) -> int:
        """The most bytes that a step holds."""
        forward, backward = self._halves(cut)
        after = {ARENA: 0, POOL: self.outputs, TORCH: 0}
        return self.steady + sum(
            max(forward.most(place), backward.most(place) + more) for place, more in after.items()
        )

    def holders(self, cut: Cut) -> tuple[tuple[str, int], ...]:
        """What is alive at the highest marks: names and bytes, largest first."""
        steady = self._bytes(self.inputs | self.returned)
        found = [("inputs and outputs of the program", steady)]
        for place in (ARENA, POOL, TORCH):
            half = max(self._halves(cut), key=lambda half: half.most(place))
            found += [(self.nodes[one.node].name, one.bytes) for one in half.at_most(place)]
        return tuple(sorted(found, key=lambda held: -held[1]))

    def _halves(self, cut: Cut) -> tuple[Half, Half]:
        inputs, returned = self.inputs, self.returned
        ahead = self._ahead(cut)
        # Views have no memory, and whoever reads one reads its base.
        runs = [number for number in self.bases if self.nodes[number] in ahead]
        forward = self._spans(runs, inputs, {*returned, *self._bases(cut.kept)})
        places = {span.node: span.place for span in forward}
        kept = self._bases(cut.kept) - inputs - returned
        owned = {number: places.get(number, POOL) for number in kept}
        owned |= {self.number[node]: TORCH for node in self.joint.tangents}
        grads = self._bases(grad for grad in self.joint.grads if isinstance(grad, fx.Node))
        count = len(self.nodes)
        numbers = ((self.number[node], early) for node, early in self.order(cut))
        again = [n + count * early for n, early in numbers if self.facts[n].base == n]
        backward = self._spans(again, {*inputs, *returned, *owned}, grads, owned)
        relays = self._bases(cut.relays)
        backward = [
            one._replace(place=POOL) if one.node in relays and one.place == ARENA else one
            for one in backward
        ]
        return Half(forward, len(runs)), Half(backward, len(again))

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.facts[number].value for number in numbers)

    def _bases(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.facts[self.number[node]].base for node in nodes}

    def _ahead(self, cut: Cut) -> set[fx.Node]:
        """What the forward computes: its own, and what is kept in place of being computed later."""
        found = set(self.own)
        stack = [node for node in cut.kept if node not in found]
        while stack:
            node = stack.pop()
            if node.op == "call_function" and node not in found:
                found.add(node)
                stack += self.sources[node]
        return found

    def _last_reads(self, runs: Sequence[int], wanted: Iterable[int]) -> dict[int, int]:
        """By value: the last run that reads it; that of a first run is another value."""
        count, facts = len(self.nodes), self.facts
        last: dict[int, int] = {}
        latest: dict[int, int] = {}  # what ran twice, by what is there
        for place, run in enumerate(runs):
            if run >= count:
                latest[run - count] = run
                run -= count
            elif run in latest:
                latest[run] = run
            for memory in facts[run].reads:
                last[latest.get(memory, memory)] = place
        for memory in wanted:
            last[latest.get(memory, memory)] = len(runs)
        return last

    def _spans(
        self,
        runs: Sequence[int],
        given: Collection[int],
        wanted: Iterable[int],
        owned: Mapping[int, int] | None = None,
    ) -> list[Span]:
        """What is in memory while a half runs; `wanted` outlive it, `owned` die in it."""
        last = self._last_reads(runs, wanted)
        count, behind = len(self.nodes), len(runs)
        facts = [self.facts[run - count if run >= count else run] for run in runs]
        calls = list(accumulate(int(fact.is_call) for fact in facts))
        calls.append(behind + 1)
        inherited: dict[int, int] = {}  # by run: the place of what it is stored over

        def span(fact: Fact, size: int, home: int, first: int, end: int) -> Span:
            """What a value takes, until a kernel that is the last to read it stores over it."""
            over = end
            # What kernels make on the way to that is nowhere.
            while over < behind and facts[over].stores_over and facts[over].bytes == size:
                then = last.get(runs[over], over)
                if not (facts[over].brief and calls[then] == calls[over]) or then == over:
                    break
                over = then
            writes = over < behind and facts[over].stores_over and over not in inherited
            if writes and facts[over].bytes == size and fact.number not in self.tangents:
                inherited[over] = home
                return Span(fact.number, home, size, first, over)
            return Span(fact.number, home, size, first, end + 1)

        spans = [
            span(self.facts[number], self.facts[number].value, place, 0, last.get(number, 0))
            for number, place in (owned or {}).items()
        ]
        for place, (run, fact) in enumerate(zip(runs, facts, strict=True)):
            end = last.get(run, place)
            if not fact.bytes or (fact.brief and calls[end] == calls[place]) or run in given:
                continue
            home = inherited.get(place)
            if home is None:
                home = _home(fact, end == behind)
            spans.append(span(fact, fact.bytes, home, place, end))
        return spans

    def order(self, cut: Cut) -> list[Run]:
        """What the backward runs."""
        return list(backward_order(self.joint, self.classes, cut, self.sources.__getitem__))

    def separators(self) -> list[fx.Node]:
        """Values that, once they are made, are all that the rest of the forward reads of what was.

        Between two of them a program can be computed again from the first alone.
        """
        order = [node for node in self.nodes if node in self.classes.forward]
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(order):
            last.update({self.nodes[base]: place for base in self.facts[self.number[node]].reads})
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
        return given + self._bytes(self.number[node] for node in made)

    def extra(self, cut: Cut) -> float:
        """What keeping and computing again costs, in bytes of traffic."""
        weights = self.network.weights
        twice = [node for node, early in self.order(cut) if early] if cut.relays else []
        return (
            sum(weights[node].keep for node in cut.kept)
            + sum(weights[node].again for node in cut.again)
            + sum(self._work(node) for node in twice)
        )

    def _work(self, node: fx.Node) -> float:
        if node not in self.work:
            self.work[node] = work_of(node)
        return self.work[node]

    def base(self) -> float:
        """What a step costs in any case."""
        nodes = [*self.classes.forward, *self.classes.backward]
        moved = sum(2 * self.sizes.get(node, 0) for node in nodes if node not in self.brief)
        return moved + sum(self._work(node) for node in nodes)


def _home(fact: Fact, outlives: bool) -> int:
    """Where the memory of a new value comes from."""
    if fact.by_torch:
        return TORCH
    return POOL if outlives or fact.bytes >= LARGE else ARENA


def _shown(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, or a part of views; None if it has memory of its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source: fx.Node = node.all_input_nodes[0]
    is_part = node.target is operator.getitem and is_view_op(source.target)
    return source if is_part or is_view_op(node.target) or _copies_nothing(node) else None


def _copies_nothing(node: fx.Node) -> bool:
    """Whether a copy will be dropped: it lies as its source does, which nobody else reads."""
    if node.target is not aten.clone.default:
        return False
    source = node.all_input_nodes[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if source.op != "call_function" or len(source.users) > 1 or not _is_plain(before, after):
        return False
    return _lies(before) == _lies(after)


def _is_plain(*values: object) -> bool:
    """Whether all are tensors with strides."""
    return all(isinstance(one, torch.Tensor) and one.layout is torch.strided for one in values)


def _lies(value: torch.Tensor) -> list[int]:
    """Strides, but for dimensions where they do not matter."""
    return [step for step, size in zip(value.stride(), value.size(), strict=True) if size != 1]


def _is_made(node: fx.Node) -> bool:
    """Whether the node has memory of its own."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and node.op == "call_function" and _shown(node) is None


def _is_told_where(node: fx.Node) -> bool:
    """Whether a library writes into memory that is planned."""
    return node.target in INTO_MEMORY


def _is_brief(node: fx.Node) -> bool:
    """Whether kernels alone make and read the value, so that it need not be in memory."""
    if node.target is operator.getitem or not is_generated(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    return all(is_generated(reader) for reader in readers(node))
