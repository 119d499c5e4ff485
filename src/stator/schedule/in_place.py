"""Updates of inputs without a copy: the kernel stores right into the input's memory.

before: new = kernel_0(new, x, grad);  copy_(x, new)
after:  kernel_0(x, grad)              which shares x: loads of a point come before its stores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from stator.core.dtypes import from_torch
from stator.loops.access import nodes
from stator.loops.ir import Buffer, Kernel, Load, Store
from stator.lower.items import Compute, Extern
from stator.lower.sizes import Sizes
from stator.lower.tensors import layout_of
from stator.schedule.fuse import Group
from stator.torch_api import is_mutable_op, returns_alias

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InPlace:
    """Kernels that store into inputs, and what that makes superfluous."""

    kernels: Mapping[Group, Kernel]
    targets: Mapping[str, str]  # name of a result -> name of the input that it is stored into
    copies: frozenset[Group]  # which nobody needs any more


def update_in_place(
    groups: Sequence[Group], kernels: Mapping[Group, Kernel], sizes: Sizes, returned: set[str]
) -> InPlace:
    """Let kernels store into inputs where the graph ends with copies to these."""
    found, targets = dict(kernels), dict[str, str]()
    copies: set[Group] = set()
    homes = {m.name: number for number, group in enumerate(groups) for m in group.members}
    readers, aliased = _readers(groups), _aliased(groups)
    for number, group in enumerate(groups):
        pair = _copied(group)
        if pair is None or pair[1].name in returned:
            continue
        target, source = pair
        place = homes.get(source.name)
        if place is None or readers[source.name] != [number]:
            continue
        home = groups[place]
        member = next(m for m in home.members if m.name == source.name)
        if not _same_layout(member, target, sizes):
            continue
        # The old value is needed after the kernel ran; under another name, perhaps.
        if target.name in aliased or any(place < n < number for n in readers[target.name]):
            continue
        shared = _sharing(found[home], member, target.name)
        if shared is not None:
            found[home] = shared
            targets[source.name] = target.name
            copies.add(group)
    return InPlace(found, targets, frozenset(copies))


def _copied(group: Group) -> tuple[fx.Node, fx.Node] | None:
    """The input and the new value, if the group copies one to the other for nobody else."""
    if not isinstance(group.alone, Extern):
        return None
    node = group.alone.node
    if node.target is not aten.copy_.default or node.users or len(node.args) != 2:
        return None
    target, source = node.args
    is_input = isinstance(target, fx.Node) and target.op == "placeholder"
    return (target, source) if is_input and isinstance(source, fx.Node) else None


def _readers(groups: Sequence[Group]) -> dict[str, list[int]]:
    """For each name, the places of groups that read it and do not make it."""
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        for name in group.reads - {member.name for member in group.members}:
            found.setdefault(name, []).append(number)
    return found


def _aliased(groups: Sequence[Group]) -> set[str]:
    """Names of what views are made of: it may be read without its name."""
    calls = [group.alone.node for group in groups if isinstance(group.alone, Extern)]
    views = [n for n in calls if returns_alias(n.target) and not is_mutable_op(n.target)]
    return {source.name for node in views for source in node.all_input_nodes}


def _same_layout(member: Compute, target: fx.Node, sizes: Sizes) -> bool:
    tensor, result = target.meta["val"], member.buffer.dtype
    known = all(sizes.index(n) is not None for n in (*tensor.size(), *tensor.stride()))
    if not known or from_torch(tensor.dtype) is not result:
        return False
    return layout_of(tensor, sizes) == (member.size, member.stride)


def _sharing(kernel: Kernel, member: Compute, target: str) -> Kernel | None:
    """The kernel with the result in the memory of the input; None if it would read too late."""
    stores = [s for s in kernel.statements if isinstance(s, Store) and s.buffer is member.buffer]
    if any(stage.inner for stage in kernel.stages) or len(kernel.stages) != 1 or len(stores) != 1:
        return None
    loads = [n for s in kernel.statements for n in nodes(s) if isinstance(n, Load)]
    if any(load.buffer in kernel.written for load in loads):
        return None
    old: set[Buffer] = {load.buffer for load in loads if load.buffer.name == target}
    if any(load.index is not stores[0].index for load in loads if load.buffer in old):
        return None
    pairs = tuple((member.buffer, buffer) for buffer in old)
    return replace(kernel, shares=(*kernel.shares, *pairs)) if pairs else kernel
