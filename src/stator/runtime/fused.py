"""A graph as kernels and calls: lowered, fused, compiled, in a plan."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.codegen.llvm.backend import load_kernels
from stator.core.dtypes import TORCH_DTYPES
from stator.core.events import Compilation
from stator.loops.values import Value
from stator.lower.items import Compute
from stator.lower.lower import Lowering
from stator.runtime.plan import Call, Constant, Free, Launch, Plan, Step, attribute
from stator.schedule.build import build_kernel
from stator.schedule.canonical import canonical
from stator.schedule.fuse import Group, fuse

WORTH_THREADS: Final = 1 << 16  # points times operations; below, forking costs more than it gains


def plan_kernels(module: fx.GraphModule, record: Compilation, name: str) -> Plan:
    """A plan in which fused loops run as native kernels."""
    lowering = Lowering(module)
    items = lowering.run()
    fused = fuse(items)
    record.notes += [f"{name}: not fused: {reason}" for reason in fused.refusals]
    record.notes += [
        f"{name}: {node} stays with torch: {reason}" for node, reason in lowering.reasons.items()
    ]
    (output,) = module.graph.find_nodes(op="output")
    wanted = _read_outside(fused.groups, output)
    steps: list[Step] = []
    kernels = [
        build_kernel(f"kernel_{number}", group, wanted[group])
        for number, group in enumerate(fused.groups)
        if group.extern is None
    ]
    entries = iter(zip(kernels, load_kernels([canonical(k) for k in kernels]), strict=True))
    for group in fused.groups:
        if group.extern is None:
            kernel, entry = next(entries)
            steps.append(_launch(group, kernel, entry))
        else:
            steps.append(_call(module, group.extern.node))
    placeholders = module.graph.find_nodes(op="placeholder")
    layouts = {
        node.name: (tuple(node.meta["val"].stride()), node.meta["val"].dtype)
        for node in lowering.real
        if isinstance(lowering.values.get(node), Value)
    }
    return Plan(
        tuple(node.name for node in placeholders),
        tuple(_with_frees(steps, [n.name for n in placeholders], output)),
        output.args[0],
        layouts,
    )


def _read_outside(groups: list[Group], output: fx.Node) -> dict[Group, set[str]]:
    """For each group, the names it makes that others read, or the caller gets."""
    returned = {node.name for node in output.all_input_nodes}
    readers: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        names = set().union(*(member.reads for member in group.members)) if group.members else set()
        if group.extern is not None:
            names |= {source.name for source in group.extern.node.all_input_nodes}
        for name in names:
            readers.setdefault(name, set()).add(number)
    return {
        group: {
            member.name
            for member in group.members
            if member.name in returned or readers.get(member.name, set()) - {number}
        }
        for number, group in enumerate(groups)
    }


def _launch(group: Group, kernel: Any, entry: Any) -> Launch:
    written = {buffer.name for buffer in kernel.written}
    made = tuple(member for member in group.members if member.name in written)
    work = sum(member.work * (1 + member.value.size) for member in group.members)
    names = tuple(b.name for b in (*kernel.written, *kernel.read))
    allocations = tuple((m.name, m.size, m.stride, _torch_dtype(m)) for m in made)
    return Launch(kernel, entry, names, allocations, parallel=work >= WORTH_THREADS)


def _torch_dtype(member: Compute) -> torch.dtype:
    return next(dtype for dtype, ours in TORCH_DTYPES.items() if ours is member.buffer.dtype)


def _call(module: fx.GraphModule, node: fx.Node) -> Step:
    if node.op == "get_attr":
        return Constant(node.name, attribute(module, str(node.target)))
    return Call(node.name, node.target, node.args, dict(node.kwargs))


def _with_frees(steps: list[Step], inputs: list[str], output: fx.Node) -> list[Step]:
    """`steps` with every value freed behind its last reader."""
    returned = {node.name for node in output.all_input_nodes}
    last: dict[str, int] = dict.fromkeys(inputs, -1)
    for number, step in enumerate(steps):
        for name in (*step.makes, *step.takes):
            last[name] = number
    dying: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in returned:
            dying.setdefault(number, []).append(name)
    freed: list[Step] = [Free(tuple(dying[-1]))] if -1 in dying else []
    for number, step in enumerate(steps):
        freed.append(step)
        if number in dying:
            freed.append(Free(tuple(dying[number])))
    return freed
