"""What a step under some cut would hold in memory, and how long it would take: before it is built.

The forward runs in the order of the joint graph, the backward as order.py says, but for what the
fuser moves.  A tensor lives from the node that makes it to its last reader (lives.py); a view keeps
its base alive.  Inputs, and values that the caller got, live throughout.

Memory comes from three places, and none gives to another: the arena of each half for what is small,
the pool for what is large or outlives it, and torch for results of libraries.  The peak is the sum
of their highest marks.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Final

import torch
from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.lives import ARENA, POOL, TORCH, Fact, Half, Lives
from stator.aot.partition.network import Cut, Network
from stator.aot.partition.order import Run, backward_order, computed_twice
from stator.aot.partition.scratch import Calling
from stator.aot.partition.weigh import bytes_of, hint_of, is_generated, readers, work_of
from stator.core.events import is_large
from stator.ops.table import POINTWISE
from stator.torch_api import is_view_op

aten = torch.ops.aten

SMALL: Final = 1024  # bytes of a value that is not worth a thought
BESIDE_A_ROW: Final = 1 << 18  # bytes that a kernel on a CPU keeps of one, at most
BESIDE_A_COLUMN: Final = 1 << 14  # of one of a block that runs together
INTO_MEMORY: Final = frozenset(  # libraries that write where they are told
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
)

BY_CHANNEL: Final = frozenset(  # kernels whose rows are the elements of one of many channels
    {
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten.native_batch_norm_backward.default,
    }
)

IN_ROWS: Final = frozenset(  # kernels that read a row before they write it, as large, in its place
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    }
)


@dataclass(slots=True)
class Simulator:
    """A joint graph, set up for many cuts: what all ask of every node is found once."""

    joint: Joint
    classes: Classes
    network: Network
    sizes: dict[fx.Node, int] = field(default_factory=dict)  # bytes of what has memory of its own
    brief: set[fx.Node] = field(default_factory=set)  # values that only kernels make and read
    sources: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    early: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # that the network knows
    nodes: list[fx.Node] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)  # by the number of a node
    number: dict[fx.Node, int] = field(default_factory=dict)
    bases: list[int] = field(default_factory=list)  # numbers of nodes that are no views
    has_memory: dict[fx.Node, int] = field(default_factory=dict)  # the same, by node
    main: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the largest part of several
    calls: dict[int, Calling] = field(default_factory=dict)  # that may take memory for themselves
    # What is foreseen, once it is asked for:
    marked: dict[Hashable, list[int]] = field(default_factory=dict)
    forwards: dict[frozenset[fx.Node], Half] = field(default_factory=dict)  # by what they keep
    # What is the same for every cut:
    inputs: frozenset[int] = field(init=False)
    returned: frozenset[int] = field(init=False)  # what the forward makes that the caller gets
    steady: int = field(init=False)  # bytes of the inputs
    outputs: int = field(init=False)  # and of the outputs
    own: frozenset[fx.Node] = field(init=False)  # what the forward computes in any case
    base: float = field(init=False)  # what a step costs in any case
    tangents: frozenset[int] = field(init=False)  # which others may hold
    last: frozenset[int] = field(init=False)  # copies that nobody but the caller reads

    def __post_init__(self) -> None:
        weights = self.network.weights
        for number, node in enumerate(self.joint.graph.nodes):
            self.nodes.append(node)
            self.number[node] = number
            self.sources[node] = node.all_input_nodes
            self.early[node] = [one for one in self.sources[node] if one in weights]
            self.facts.append(self._fact(number, node))
        joint = self.joint
        values = (*joint.values, *(new for _, new in joint.updates))
        self.inputs = frozenset(self._bases(joint.primals))
        self.tangents = frozenset(self._bases(joint.tangents))
        made_values = self._bases(node for node in values if isinstance(node, fx.Node))
        self.returned = frozenset(made_values) - self.inputs
        self.steady = sum(bytes_of(node.meta.get("val")) for node in joint.primals)
        self.outputs = self._bytes(self.returned)
        self.last = frozenset(self.number[node] for node in self.nodes if _is_for_caller(node))
        self.own = frozenset(n for n in self.classes.forward if n.op == "call_function")
        run = [*self.classes.forward, *self.classes.backward]
        moved = sum(2 * self.sizes.get(node, 0) for node in run if node not in self.brief)
        self.base = moved + sum(self._work(node) for node in run)

    def _fact(self, number: int, node: fx.Node) -> Fact:
        shown, sources = _shown(node), self.sources[node]
        if node.target is operator.getitem and sources[0] in self.main:  # others come with it
            shown, sources = (sources[0], sources) if self.main[sources[0]] is node else (None, [])
        base = number if shown is None else self.facts[self.number[shown]].base
        reads = {self.facts[self.number[source]].base for source in sources}
        if base == number:
            self.bases.append(number)
            self.has_memory[node] = number
        called = not is_generated(node)
        main = None if called else _largest_part(node)
        if main is not None:
            self.main[node] = main
        of = main or node  # whose memory it is
        value = of.meta.get("val")
        size = bytes_of(value)
        made = size if main or (shown is None and _is_made(node)) else 0
        brief = bool(made) and _is_brief(of, self.main)
        if made:
            self.sizes[node] = made
            self.brief.update([node] if brief else [])
        over = node.target in POINTWISE or node.target in IN_ROWS or main is not None
        if not called and node.target not in POINTWISE and not is_view_op(node.target):
            for source in reads:
                self.facts[source].reduced.append(number)
                if _goes_far(node, self.nodes[source]):
                    self.facts[source].far.append(number)
        by_torch = called and not _is_told_where(node)
        if by_torch and node.op == "call_function":
            calling = Calling(node.target, node.args, node.kwargs)
            self.calls |= {number: calling} if calling.most else {}
        large = is_large(made, on_gpu=isinstance(value, torch.Tensor) and value.is_cuda)
        is_part = called and node.target is operator.getitem
        whole = self.number[sources[0]] if is_part else None
        own = (number, base, tuple(reads), size, made, large, brief, called, over, by_torch)
        return Fact(*own, part_of=whole)

    def peak(self, cut: Cut) -> int:
        """The most bytes that a step holds."""
        return self.steady + sum(self.marks(cut))

    def marks(self, cut: Cut) -> list[int]:
        """The same by place, inputs aside."""
        key = (cut.kept, cut.again, cut.relays)
        if key not in self.marked:
            forward, backward = (half.most() for half in self._halves(cut))
            backward[POOL] += self.outputs
            self.marked[key] = list(map(max, forward, backward))
        return self.marked[key]

    def least(self, cut: Cut) -> int:
        """Bytes that a step holds at least: what lies between forward and backward."""
        made = self._bases(cut.kept) - self.inputs - self.returned
        return self.steady + self.outputs + self._bytes(made)

    def holders(self, cut: Cut) -> tuple[tuple[str, int], ...]:
        """What is alive at the highest marks: names and bytes, largest first."""
        steady = self._bytes(self.inputs | self.returned)
        found, halves = [("inputs and outputs of the program", steady)], self._halves(cut)
        for place in (ARENA, POOL, TORCH):
            half = max(halves, key=lambda half: half.most()[place])
            found += [(self.nodes[one.node].name, one.bytes) for one in half.at_most(place)]
        return tuple(sorted(found, key=lambda held: -held[1]))

    def _halves(self, cut: Cut) -> tuple[Half, Half]:
        forward = self._forward(cut)
        return forward, self._backward(cut, {span.node: span.place for span in forward.spans})

    def _forward(self, cut: Cut) -> Half:
        """The same for all cuts that keep the same values of the forward's."""
        made = frozenset(node for node in cut.kept if node.op == "call_function")
        if made not in self.forwards:
            ahead = self._ahead(made)
            # Views have no memory, and whoever reads one reads its base.
            runs = [number for number in self.bases if self.nodes[number] in ahead]
            wanted = {*self.returned, *self._bases(made)}
            spans = Lives(self.facts, runs, self.tangents).spans(self.inputs, wanted)
            self.forwards[made] = Half(spans, len(runs), self._asking(runs))
        return self.forwards[made]

    def _backward(self, cut: Cut, places: Mapping[int, int]) -> Half:
        """What is kept comes from `places`."""
        inputs, returned = self.inputs, self.returned
        kept = self._bases(cut.kept) - inputs - returned
        owned = {number: places.get(number, POOL) for number in kept}
        owned |= {self.number[node]: TORCH for node in self.joint.tangents}
        grads = self._bases(grad for grad in self.joint.grads if isinstance(grad, fx.Node))
        count = len(self.nodes)
        own = self.has_memory
        again = [own[node] + count * early for node, early in self.order(cut) if node in own]
        # The plan makes copies of its own values for the caller when all else is done.
        again.sort(key=self.last.__contains__)
        again = self._joined(self._where_read(again))
        lives = Lives(self.facts, again, self.tangents)
        spans = lives.spans({*inputs, *returned, *owned}, grads, owned)
        relays = self._bases(cut.relays)
        spans = [
            one._replace(place=POOL) if one.node in relays and one.place == ARENA else one
            for one in spans
        ]
        return Half(spans, len(again), self._asking(again))

    def _asking(self, runs: Sequence[int]) -> dict[int, Calling]:
        """Calls among `runs` that may take memory for themselves."""
        count, calls = len(self.nodes), self.calls
        if not calls:
            return {}
        numbers = enumerate(run % count for run in runs)
        return {step: calls[number] for step, number in numbers if number in calls}

    def _joined(self, runs: Sequence[int]) -> list[int]:
        """`runs` with large kernels ahead of a call if those before it read the same.

        So an activation that is computed again runs with its own backward: both store over.
        """
        count = len(self.nodes)
        parts: list[list[int]] = [[]]  # what runs from one call to the next
        reads: list[set[int]] = [set()]
        home: dict[int, int] = {}  # by run: the part that it is in
        for run in runs:
            fact = self.facts[run - count if run >= count else run]
            if fact.is_call:
                parts.append([])
                reads.append(set())
            here = len(parts) - 1
            if fact.stores_over and fact.large and here and not fact.brief:
                shared = [one for one in fact.reads if one in reads[here - 1]]
                early = all(home.get(one, 0) < here for one in fact.reads)
                here -= early and any(self.facts[one].bytes == fact.bytes for one in shared)
            home[run] = here
            parts[here].append(run)
            if not fact.is_call:
                reads[here].update(fact.reads)
        return list(chain.from_iterable(parts))

    def _where_read(self, runs: Sequence[int]) -> Sequence[int]:
        """`runs` with what a kernel behind a call computes as it reads it, at that place.

        As a mask that is kept in few bits and read in more.
        """
        if max(runs, default=0) >= len(self.nodes):  # some run twice, to be there early
            return runs
        calls = dict(zip(runs, accumulate(self.facts[run].is_call for run in runs), strict=True))
        readers: dict[int, list[int]] = {}
        for run in runs:
            for memory in self.facts[run].reads:
                readers.setdefault(memory, []).append(run)
        ends: dict[int, int] = {}  # by what waits: the kernel that computes it
        waiting: dict[int, list[int]] = {}  # by its reader
        for run in reversed(runs):
            found = readers.get(run, ())
            is_inside = self.facts[run].brief and _is_as_read(self.nodes[run])
            if is_inside and len(found) == 1:
                end = ends.get(found[0], found[0])
                if calls[end] != calls[run]:
                    ends[run] = end
                    waiting.setdefault(found[0], []).append(run)
        ordered: list[int] = []
        stack = [run for run in reversed(runs) if run not in ends]
        while stack:
            run = stack.pop()
            before = waiting.pop(run, None)
            if before:
                stack += [run, *before]
            else:
                ordered.append(run)
        return ordered

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.facts[number].value for number in numbers)

    def _bases(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {self.facts[self.number[node]].base for node in nodes}

    def _ahead(self, kept: Iterable[fx.Node]) -> set[fx.Node]:
        """What the forward computes: its own, and what is kept in place of being computed later."""
        found = set(self.own)
        stack = [node for node in kept if node not in found]
        while stack:
            node = stack.pop()
            if node.op == "call_function" and node not in found:
                found.add(node)
                stack += self.sources[node]
        return found

    def order(self, cut: Cut) -> list[Run]:
        """What the backward runs."""
        return backward_order(self.joint, self.classes, cut, self.early.__getitem__)

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
        parts = [self.main.get(node, node) for node in found]
        return [node for node in parts if node in self.network.weights]

    def saved(self, cut: Cut) -> int:
        """Bytes that the backward gets of the forward, inputs aside that are there anyway."""
        weights = self.network.weights
        given = sum(weights[node].bytes for node in cut.kept if node.op == "placeholder")
        made = [node for node in cut.kept if node.op != "placeholder"]
        return given + self._bytes(self.number[node] for node in made)

    def extra(self, cut: Cut) -> float:
        """What keeping and computing again costs, in bytes of traffic."""
        weights = self.network.weights
        twice = computed_twice(cut, self.early.__getitem__)
        return (
            sum(weights[node].keep for node in cut.kept)
            + sum(weights[node].again for node in cut.again)
            + sum(self._work(node) for node in twice)
        )

    def _work(self, node: fx.Node) -> float:
        known = self.network.work
        if node not in known:
            known[node] = work_of(node)
        return known[node]


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


def _is_brief(node: fx.Node, main: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether kernels alone make and read the value, so that it need not be in memory."""
    is_small_part = (
        node.target is operator.getitem and main.get(node.all_input_nodes[0]) is not node
    )
    if is_small_part or not is_generated(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    return all(is_generated(reader) for reader in readers(node))


def _is_as_read(node: fx.Node) -> bool:
    """Whether an element is computed of some others, so that its reader may do that."""
    return node.target in POINTWISE or node.target is aten._to_copy.default


def _goes_far(node: fx.Node, source: fx.Node) -> bool:
    """Whether a kernel reads a value again that does not lie beside it until then.

    On a GPU it is computed again.
    """
    value = source.meta.get("val")
    if node.target not in BY_CHANNEL or not isinstance(value, torch.Tensor) or value.is_cuda:
        return False
    if value.dim() < 2:
        return False
    most = BESIDE_A_COLUMN if value.stride(1) == 1 else BESIDE_A_ROW
    return bytes_of(value) > most * hint_of(value.size(1))


def _is_for_caller(node: fx.Node) -> bool:
    """Whether it copies a value for the caller alone; those of libraries are copied at once."""
    if node.target is not aten.clone.default or any(user.op != "output" for user in node.users):
        return False
    source = node.all_input_nodes[0]
    return is_generated(source) or source.op != "call_function" or len(source.users) > 1


def _largest_part(node: fx.Node) -> fx.Node | None:
    """Of a kernel with several results, the one that matters: the others are a row's numbers."""
    if not isinstance(node.meta.get("val"), tuple | list):
        return None
    parts = [user for user in node.users if user.target is operator.getitem]
    tensors = [part for part in parts if isinstance(part.meta.get("val"), torch.Tensor)]
    return max(tensors, key=lambda part: bytes_of(part.meta["val"]), default=None)
