"""Results in the memory of what they are made of, where nobody reads that any more.

before: y = convolution(x, w);  z = kernel_0(z, y)
after:  y = convolution(x, w);  kernel_0(y);  z is y     which shares y: loads come before stores

It saves memory, and time: a line of the cache that was read is written, and no other one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from stator.loops.access import nodes
from stator.loops.index import Index
from stator.loops.ir import Buffer, Kernel, Load, Stage, Store
from stator.loops.same_row import stays_in_row
from stator.loops.values import product
from stator.lower.items import Compute, Extern
from stator.lower.sizes import Sizes
from stator.lower.tensors import extent, layout_of
from stator.ops.writes import onto
from stator.schedule.fuse import Group
from stator.torch_api import keeps_nothing


@dataclass(frozen=True, slots=True)
class Overwriting:
    """Kernels and calls that store into the memory of what they read last."""

    kernels: Mapping[Group, Kernel]
    targets: Mapping[str, str]  # name of a result -> name of the value whose memory it takes


def overwrite_dying(
    groups: Sequence[Group],
    kernels: Mapping[Group, Kernel],
    sizes: Sizes,
    taken: Mapping[str, str],
    returned: set[str],
    donated: Mapping[str, Index] | None = None,
) -> Overwriting:
    """Let kernels and libraries store over values of the graph's own that they read last.

    `taken` are results that are stored into inputs; `returned` are the names of outputs; `donated`
    are elements of inputs that are the graph's own too.
    """
    own = _Own(groups, sizes, {*taken, *returned}, donated or {})
    loads_of = cache(_loads)  # each value that dies is asked for
    found, targets = dict(kernels), dict[str, str]()
    for number, group in enumerate(groups):
        if isinstance(group.alone, Extern) and (name := own.added_to(number, group.alone.node)):
            targets[group.alone.name] = name
            own.gone.add(own.source(name))
        if group not in kernels or group.alone is not None:
            continue
        for member in group.members:
            if member.name in taken or member.buffer not in found[group].written:
                continue
            for name in own.dying(number, member):
                shared = _sharing(found[group], member.buffer, name, loads_of)
                if shared is not None:
                    found[group], targets[member.name] = shared, name
                    own.gone.add(name)
                    break
    return Overwriting(found, targets)


class _Own:
    """Values that the graph makes for itself, and who reads them last."""

    def __init__(
        self,
        groups: Sequence[Group],
        sizes: Sizes,
        outside: set[str],
        donated: Mapping[str, Index],
    ) -> None:
        self.groups = groups
        self.last: dict[str, int] = {}
        self.totals = dict(donated)  # elements of those that may be stored over
        self.makers = dict.fromkeys(donated, -1)
        self.sources = _sources(groups)
        self.gone: set[str] = set()
        for number, group in enumerate(groups):
            self.last.update(dict.fromkeys(group.reads, number))
            self.last.update({self.source(name): number for name in group.reads})
            made = dict(_fresh(group, sizes))
            self.totals |= made
            self.makers |= dict.fromkeys(made, number)
        # Those that calls may add to have other names as long as nobody keeps them.
        kept = {self.source(name) for name in {*outside, *_looked_at(groups, self.sources)}}
        self.free = self.totals.keys() - kept
        for name in {*outside, *_looked_at(groups)}:
            self.totals.pop(name, None)

    def source(self, name: str) -> str:
        """The value whose memory a name stands for."""
        return self.sources.get(name, name)

    def dying(self, number: int, member: Compute) -> list[str]:
        """Values as large as the member's that nobody reads behind its group.

        What was made last comes first: it is in the cache, and it is the same in every layer of a
        network, so that these share a kernel.
        """
        made_here = {other.name for other in self.groups[number].members}
        found = (
            name
            for name in self.groups[number].reads - made_here
            if self.last[name] == number
            and name not in self.gone
            and self.totals.get(name) is member.total
        )
        return sorted(found, key=lambda name: (-self.makers[name], name))

    def added_to(self, number: int, node: fx.Node) -> str | None:
        """The value that a call may add to where that lies; None if it needs memory of its own."""
        way = onto(node.target)
        if way is None:
            return None
        old = node.args[way.place]
        if not isinstance(old, fx.Node) or node.args.count(old) != 1:  # it would read its result
            return None
        before, after = (value.meta["val"] for value in (old, node))
        layouts = [(one.dtype, one.size(), one.stride()) for one in (before, after)]
        alike = layouts[0] == layouts[1]
        source = self.source(old.name)
        others = [one for one in node.all_input_nodes if self.source(one.name) == source]
        is_free = source in self.free and source not in self.gone and others == [old]
        return old.name if alike and is_free and self.last[source] == number else None


def _fresh(group: Group, sizes: Sizes) -> Iterator[tuple[str, Index]]:
    """Names and elements of the new tensors without gaps that a group makes."""
    for member in group.members:
        if extent(member.size, member.stride) is member.total:
            yield member.name, member.total
    if isinstance(group.alone, Extern):
        total = without_gaps(_result(group.alone.node), sizes)
        if total is not None:
            yield group.alone.name, total


def without_gaps(value: Any, sizes: Sizes) -> Index | None:
    """Elements of a tensor that fill its memory; None if they do not, or nobody knows."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if any(sizes.index(n) is None for n in (*value.size(), *value.stride())):
        return None
    size, stride = layout_of(value, sizes)
    return product(size) if extent(size, stride) is product(size) else None


def _result(node: fx.Node) -> torch.Tensor | None:
    """What a call returns in memory of its own, or a part of that."""
    source = node.args[0] if node.target is operator.getitem else node
    made = node.meta.get("val")
    plain = isinstance(made, torch.Tensor) and made.layout is torch.strided
    if not plain or not isinstance(source, fx.Node) or not _is_fresh(source.target):
        return None
    if source is not node and sum(user.args[1] == node.args[1] for user in source.users) != 1:
        return None  # the same tensor has two names
    return made


def _is_fresh(target: Any) -> bool:
    """Whether a call makes a new tensor, and keeps nothing of what it reads."""
    return keeps_nothing(target) or onto(target) is not None


def _sources(groups: Sequence[Group]) -> dict[str, str]:
    """Names of permutations, and of the values whose memory they are."""
    found: dict[str, str] = {}
    for group in groups:
        node = group.alone.node if isinstance(group.alone, Extern) else None
        if node is not None and node.target is torch.ops.aten.permute.default:
            (source,) = node.all_input_nodes
            found[node.name] = found.get(source.name, source.name)
    return found


def _looked_at(groups: Sequence[Group], known: Mapping[str, str] | None = None) -> set[str]:
    """Values whose memory has a second name that is not known, or is kept by somebody."""
    found = set()
    for group in groups:
        match group.alone:
            case Extern(node=node) if node.target is not operator.getitem:
                if not _is_fresh(node.target) and node.name not in (known or {}):
                    found |= {source.name for source in node.all_input_nodes}
            case None | Extern():
                pass
            case other:
                found |= {*other.reads, other.name}
    return found


def _sharing(
    kernel: Kernel, result: Buffer, name: str, loads_of: Callable[[Stage], Sequence[Load]]
) -> Kernel | None:
    """The kernel with `result` in the memory of `name`; None if it would read too late."""
    homes = [number for number, stage in enumerate(kernel.stages) if _stores(stage, result)]
    if len(homes) != 1 or any(stage.in_order for stage in kernel.stages):
        return None
    home, late = kernel.stages[homes[0]], kernel.stages[homes[0] + 1 :]
    store, *others = _stores(home, result)
    if others or store.combine is not None:
        return None
    loads = [(stage, load) for stage in kernel.stages for load in loads_of(stage)]
    if any(load.buffer is result and stage not in late for stage, load in loads):
        return None  # another row may have stored what it reads
    reads = [(stage, load) for stage, load in loads if load.buffer.name == name]
    old = {load.buffer for _, load in reads}
    if {buffer.dtype for buffer in old} != {result.dtype} or any(
        stage in late for stage, _ in reads
    ):
        return None
    if any(load.index is not store.index for stage, load in reads if stage is home):
        return None
    before = [load.index for stage, load in reads if stage is not home]
    if not stays_in_row(kernel.outer, store.index, before):
        return None
    pairs = tuple((result, buffer) for buffer in old)
    if len(kernel.stages) == 1 and not home.inner:
        return replace(kernel, shares=(*kernel.shares, *pairs))
    moved = _stored_last(home, store, kernel)
    if moved is None:
        return None
    stages = (*kernel.stages[: homes[0]], moved, *late)
    return replace(kernel, stages=stages, shares=(*kernel.shares, *pairs))


def _stored_last(stage: Stage, store: Store, kernel: Kernel) -> Stage | None:
    """The stage with a store behind all its loads; None if another one has to stand there.

    A flat loop loads all of a point before it stores anything; others go by statements.
    """
    shared = {written for written, _ in kernel.shares}
    if any(isinstance(s, Store) and s.buffer in shared for s in stage.body):
        return None
    return replace(stage, body=(*(s for s in stage.body if s is not store), store))


def _stores(stage: Stage, result: Buffer) -> list[Store]:
    return [s for s in stage.body if isinstance(s, Store) and s.buffer is result]


def _loads(stage: Stage) -> list[Load]:
    return [node for s in stage.body for node in nodes(s) if isinstance(node, Load)]
