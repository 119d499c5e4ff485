"""Matrix products that may run in one kernel with the loops that read them.

before: y = addmm(bias, a, b);  z = kernel_0(z, y)       y = bias + a @ b, z = gelu(y)
after:  z = kernel_0(z, a, b, bias)                      y too, if somebody else reads it

Whether they had better is for a measurement to say: torch's libraries multiply faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import DType, from_torch
from stator.graph.edit import is_effect
from stator.loops.build import apply
from stator.loops.ir import Buffer, Combine
from stator.loops.prims import Prim
from stator.loops.values import broadcast
from stator.lower.items import Compute, Extern
from stator.lower.lower import Lowering
from stator.lower.tensors import axes_of, contiguous, extent, from_memory, point_of, stored
from stator.schedule.fuse import Group
from stator.schedule.rows import assign
from stator.torch_api import is_mutable_op

aten: Final = torch.ops.aten
PRODUCTS: Final = (aten.mm.default, aten.addmm.default)
HALVES: Final = (torch.float16, torch.bfloat16)
SHORTEST: Final = 16  # of the three sizes: less does not fill the matrix units


@dataclass(frozen=True, slots=True)
class Joinable:
    """A product, the loops that read it, and both as one group."""

    call: Group
    loops: Group
    joined: Group
    node: fx.Node
    early: bool  # they run where the product was; else where the loops were

    def applied(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with both as one."""
        place, gone = (self.call, self.loops) if self.early else (self.loops, self.call)
        others = (group for group in groups if group is not gone)
        return [self.joined if group is place else group for group in others]


def joinable(
    groups: Sequence[Group], lowering: Lowering, refused: dict[str, str]
) -> Joinable | None:
    """The first product with loops that may join it, of those that are not among `refused`.

    Others that cannot join are from now on, each with the reason.
    """
    calls = {g.alone.name: g for g in groups if isinstance(g.alone, Extern) and _is_product(g)}
    for loops in groups:
        if loops.alone is not None or loops.leads:
            continue
        for name in sorted(loops.reads & calls.keys() - refused.keys()):
            found = _joined(calls[name], loops, groups, lowering)
            if isinstance(found, Joinable):
                return found
            refused[name] = found
    return None


def _is_product(group: Group) -> bool:
    return isinstance(group.alone, Extern) and group.alone.node.target in PRODUCTS


def _joined(
    call: Group, loops: Group, groups: Sequence[Group], lowering: Lowering
) -> Joinable | str:
    """Both as one group; or why not."""
    assert isinstance(call.alone, Extern), "a product is a call"
    node = call.alone.node
    early = _may_be_early(call, loops, groups)
    reason = why_no_kernel(node, lowering) or _why_apart(call, loops, groups, early=early)
    if reason is not None:
        return reason
    members = [*_loops_of(node, lowering), *loops.members]
    rows, why = assign(members)
    if rows is None or why:
        return why
    return Joinable(call, loops, Group(members, rows), node, early)


def why_no_kernel(node: fx.Node, lowering: Lowering) -> str | None:
    """None if loops can say what the product computes; otherwise the reason."""
    operands = [given for given in node.args if isinstance(given, fx.Node)]
    values = [source.meta.get("val") for source in (*operands, node)]
    if lowering.as_eager:
        return "a kernel has other bits"
    if node.kwargs:
        return "it scales what it adds"
    if any(not isinstance(v, torch.Tensor) or v.dtype not in HALVES for v in values):
        return "a kernel is for half precision alone"
    if any(not isinstance(n, int) for v in values for n in (*v.size(), *v.stride())):
        return "its sizes are not known"
    if any(source not in lowering.real for source in operands):
        return "an operand is not in memory"
    if min(*values[-1].size(), values[-2].size(0)) < SHORTEST:
        return f"a side is shorter than {SHORTEST}"
    return None if values[-1].is_contiguous() else "its result does not lie in rows"


def _may_be_early(call: Group, loops: Group, groups: Sequence[Group]) -> bool:
    """Whether the loops could run where the product does: nothing that they read is made later."""
    between = groups[groups.index(call) + 1 : groups.index(loops)]
    made = {member.name for group in between for member in group.members}
    made |= {group.alone.name for group in between if group.alone is not None}
    return made.isdisjoint(loops.reads)


def _why_apart(call: Group, loops: Group, groups: Sequence[Group], *, early: bool) -> str | None:
    """None if both may run at one place; otherwise the reason."""
    assert isinstance(call.alone, Extern), "a product is a call"
    between = groups[groups.index(call) + 1 : groups.index(loops)]
    if not early and any(call.alone.name in group.reads for group in between):
        return "something else reads it before"
    for group in between:
        if isinstance(group.alone, Extern) and _writes(group.alone.node):
            return f"{group.alone.name} may write to what it reads"
    return None


def _writes(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_effect(node) or is_mutable_op(node.target))


def _loops_of(node: fx.Node, lowering: Lowering) -> list[Compute]:
    """The product as a reduction, and what it is added to."""
    *added, left, right = (from_memory(_node(given), lowering.sizes) for given in node.args)
    size = (left.size[0], right.size[1])
    name = f"{node.name}_product" if added else str(node.name)
    lowering.makers[name] = node
    outer, inner = axes_of(name, "o", size), axes_of(name, "r", [left.size[1]])
    (row, column), (along,) = point_of(outer), point_of(inner)
    value = apply(Prim.MUL, left.load((row, along)), right.load((along, column)))
    own = from_torch(node.meta["val"].dtype)
    assert own is not None, "half precision"
    stride = contiguous(size)
    buffer = Buffer(name, DType.F32 if added else own, extent(size, stride))
    total = Compute(buffer, size, stride, outer, inner, Combine.SUM, value)
    if not added:
        return [total]
    axes = axes_of(node.name, "o", size)
    point = point_of(axes)
    product, bias = stored(buffer, size, stride), broadcast(added[0], size)
    value = apply(Prim.ADD, product.load(point), bias.load(point))
    result = Buffer(node.name, own, extent(size, stride))
    return [total, Compute(result, size, stride, axes, (), None, value)]


def _node(given: Any) -> fx.Node:
    assert isinstance(given, fx.Node), "an operand is a tensor"
    return given
