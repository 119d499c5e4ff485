"""A graph as kernels and calls: lowered, fused, compiled, in a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from threading import Thread

import torch
from torch import fx

from stator.codegen.triton.shape import Shape
from stator.core.dtypes import TORCH_DTYPES
from stator.core.dump import Dump
from stator.core.events import Compilation
from stator.graph.edit import AGAIN, DONATED, EARLY, KEPT
from stator.loops.index import Index
from stator.loops.ir import Kernel
from stator.loops.values import Value
from stator.lower.items import Check, Compute, Extern, Item, Scatter, Size
from stator.lower.lower import Lowering
from stator.lower.sizes import Sizes
from stator.lower.tensors import layout_of
from stator.runtime.calls import call_of, call_onto, through_c, view_of
from stator.runtime.dump import (
    assembly_text,
    kernels_text,
    llvm_text,
    loops_text,
    schedule_text,
    triton_text,
)
from stator.runtime.loading import AT_ONCE, Code, Loading
from stator.runtime.origins import Lowered
from stator.runtime.plan import (
    Allocation,
    Constant,
    Free,
    Launch,
    Number,
    Plan,
    Require,
    Step,
    View,
    attribute,
    loose_names,
)
from stator.runtime.products import join_products
from stator.runtime.together import join_launches
from stator.schedule.build import build_kernel
from stator.schedule.canonical import Canonical, canonical
from stator.schedule.fuse import FEW_ROWS, Fused, Group, fuse
from stator.schedule.in_place import update_in_place
from stator.schedule.overwrite import overwrite_dying, without_gaps
from stator.schedule.registers import build_gpu_kernel
from stator.torch_api import OpOverload


def plan_kernels(
    module: fx.GraphModule,
    record: Compilation,
    name: str,
    dump: Dump,
    *,
    loading: Loading = AT_ONCE,
    lowering: Lowering | None = None,
) -> Plan:
    """A plan in which fused loops run as native kernels.

    `loading` says where these get their code, `lowering` which operators may become loops.
    """
    lowering = lowering or Lowering(module)
    items = lowering.run()
    _count(module.graph, items, record)
    dump.write(f"{name}_loops.txt", lambda: loops_text(items))
    (output,) = module.graph.find_nodes(op="output")
    returned = {node.name for node in output.all_input_nodes}
    on_cpu = not lowering.target.uses_triton
    fused = _fused(items, lowering, returned)
    wanted = partial(_read_outside, output=output)
    products = join_products(fused, lowering, wanted, loading, record.notes)
    dump.write(f"{name}_schedule.txt", lambda: schedule_text(fused))
    kernels = _kernels(fused.groups, wanted(fused.groups), lowering)
    updates = update_in_place(fused.groups, kernels, lowering.sizes, returned)
    donated = _donated(module.graph, lowering.sizes)
    over = overwrite_dying(
        fused.groups, updates.kernels, lowering.sizes, updates.targets, returned, donated
    )
    _note_kernels(lowering, over.kernels)
    lowered = Lowered(lowering, fused, over.kernels)
    lowered.note(name, record)
    dump.write(f"{name}_kernels.txt", lambda: kernels_text(list(over.kernels.values())))
    targets = {**updates.targets, **over.targets}
    launches = {
        group: _launch(group, kernel, canonical(kernel, any_length=on_cpu), targets)
        for group, kernel in over.kernels.items()
    }
    kept = [group for group in fused.groups if group not in updates.copies]
    steps = _in_order(lowering, kept, launches, over.targets)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    loose = frozenset() if on_cpu else loose_names(steps, {*placeholders} - donated.keys())
    code = Code(steps, lowering, loose, targets, _settled(launches, products))
    shapes = code.tuned(loading, record.notes)
    _dump_code(dump, name, code, shapes)
    return Plan(
        tuple(placeholders),
        tuple(_with_frees(steps, placeholders, output)),
        output.args[0],
        _layouts(lowering),
        {symbol.name: source for symbol, source in lowering.sizes.sources.items()},
        code.loaded(loading, shapes),
        dict(lowering.sizes.hints),
        frozenset(node.name for node in module.graph.nodes if node.meta.get(KEPT)),
        frozenset(over.targets.values()) & donated.keys(),
        lowered.origins,
        loose,
        lowering.target.device,
    )


def _settled(
    launches: Mapping[Group, Launch], products: Mapping[Group, Shape]
) -> dict[Kernel, Shape]:
    return {launches[group].nameless: shape for group, shape in products.items()}


def _fused(items: Sequence[Item], lowering: Lowering, returned: set[str]) -> Fused:
    nodes = lowering.module.graph.nodes
    late = any(node.meta.get(EARLY) or node.meta.get(AGAIN) for node in nodes)
    on_gpu = lowering.target.uses_triton
    few_rows = FEW_ROWS if on_gpu else 1
    return fuse(items, lowering.sizes, returned, late=late, few_rows=few_rows, in_registers=on_gpu)


def begin_workers() -> None:
    """Start what compiles kernels for a GPU, while the graph is still being traced."""
    from stator.codegen.triton.compile import has_triton, workers

    if has_triton() and torch.version.hip is None:  # else whoever wants a kernel is told
        Thread(target=workers, daemon=True).start()


def _dump_code(dump: Dump, name: str, code: Code, shapes: Mapping[Kernel, Shape]) -> None:
    """Before it is compiled: what a compiler refuses can be read."""
    steps = code.steps
    if code.lowering.target.uses_triton:
        dump.write(f"{name}_triton.py", lambda: triton_text(steps, shapes))
        return
    dump.write(f"{name}.ll", lambda: llvm_text(steps))
    dump.write(f"{name}.s", lambda: assembly_text(steps))


def _kernels(
    groups: Sequence[Group], wanted: Mapping[Group, set[str]], lowering: Lowering
) -> dict[Group, Kernel]:
    build = build_gpu_kernel if lowering.target.uses_triton else build_kernel
    return {
        group: build(f"kernel_{number}", group, wanted[group], lowering.sizes)
        for number, group in enumerate(groups)
        if group.alone is None or isinstance(group.alone, Scatter)
    }


def _donated(graph: fx.Graph, sizes: Sizes) -> dict[str, Index]:
    """Elements of inputs that may be stored over."""
    nodes = (n for n in graph.find_nodes(op="placeholder") if n.meta.get(DONATED))
    totals = ((node.name, without_gaps(node.meta.get("val"), sizes)) for node in nodes)
    return {name: total for name, total in totals if total is not None}


def _in_order(
    lowering: Lowering,
    groups: Sequence[Group],
    launches: Mapping[Group, Launch],
    targets: Mapping[str, str],
) -> list[Step]:
    """A launch or a call for each group, and the names of what was written over other values."""
    steps = [
        step
        for group in groups
        for step in (
            launches.get(group) or _alone(lowering, group, targets),
            *_renamed(group, targets, lowering.sizes),
        )
    ]
    on_gpu = lowering.target.uses_triton
    return steps if on_gpu else join_launches(steps, lowering.sizes.hint)


def _note_kernels(lowering: Lowering, kernels: Mapping[Group, Kernel]) -> None:
    """In the log of the fuel: the kernel that computes each operator that became loops.

    A value that is not in memory is computed where it is read, maybe in several kernels.
    """
    if lowering.fuel.log is None:
        return
    found = {member.name: kernel for group, kernel in kernels.items() for member in group.members}
    within: dict[str, list[str]] = {}
    for node in reversed(lowering.module.graph.nodes):
        read = dict.fromkeys(name for user in node.users for name in within.get(user.name, ()))
        within[node.name] = [found[node.name].name] if node.name in found else list(read)
    for name, where in within.items():
        if where:
            lowering.fuel.note(name, ", ".join(where))


def _count(graph: fx.Graph, items: Sequence[Item], record: Compilation) -> None:
    """Note which operators became loops, and which are calls."""
    called = {item.name for item in items if isinstance(item, Extern)}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            if node.name in called:
                record.called.append(str(node.target))
            else:
                record.generated += 1


def _layouts(lowering: Lowering) -> dict[str, tuple[tuple[Index, ...], torch.dtype]]:
    """How tensors must lie that torch makes and kernels read."""
    return {
        node.name: (layout_of(node.meta["val"], lowering.sizes)[1], node.meta["val"].dtype)
        for node in lowering.real
        if isinstance(lowering.values.get(node), Value)
    }


def _read_outside(groups: Sequence[Group], output: fx.Node) -> dict[Group, set[str]]:
    """For each group, the names it makes that others read, or the caller gets."""
    returned = {node.name for node in output.all_input_nodes}
    readers: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for name in group.reads:
            readers.setdefault(name, set()).add(number)
    return {
        group: {
            member.name
            for member in group.members
            if member.name in returned or readers.get(member.name, set()) - {number}
        }
        for number, group in enumerate(groups)
    }


def _launch(group: Group, kernel: Kernel, found: Canonical, targets: Mapping[str, str]) -> Launch:
    written = {buffer.name for buffer in kernel.written}
    if isinstance(group.alone, Scatter):
        work = group.alone.work * (1 + group.alone.value.size)
    else:
        work = sum((m.work * (1 + m.value.size) for m in group.members), Index.of(0))
    allocations = tuple(
        Allocation(m.name, m.size, m.stride, _torch_dtype(m))
        for m in group.members
        if m.name in written and m.name not in targets
    )
    names = tuple(targets.get(buffer.name, buffer.name) for buffer in found.buffers)
    stored = tuple(targets[m.name] for m in group.members if m.name in targets)
    return Launch(kernel, found.kernel, names, found.sizes, allocations, work, stored)


def _renamed(group: Group, targets: Mapping[str, str], sizes: Sizes) -> Iterator[View]:
    """Results that lie in the memory of what was read for them, under their own names."""
    if isinstance(group.alone, Extern) and group.alone.name in targets:
        value = group.alone.node.meta["val"]
        made = Allocation(group.alone.name, *layout_of(value, sizes), value.dtype)
        yield View(targets[group.alone.name], made, Index.of(0))
    for member in group.members:
        if member.name in targets:
            made = Allocation(member.name, member.size, member.stride, _torch_dtype(member))
            yield View(targets[member.name], made, Index.of(0))


def _alone(lowering: Lowering, group: Group, targets: Mapping[str, str]) -> Step:
    match group.alone:
        case Extern(node=node) if node.name in targets:
            return call_onto(node, targets[node.name])
        case Extern():
            return _call(lowering, group.alone.node)
        case Check():
            return Require(group.alone.flag, group.alone.error, group.alone.message)
        case Size():
            return Number(group.alone.name, group.alone.index)
        case _:
            raise AssertionError("loops and scatters are launched")


def _torch_dtype(member: Compute) -> torch.dtype:
    return next(dtype for dtype, ours in TORCH_DTYPES.items() if ours is member.buffer.dtype)


def _call(lowering: Lowering, node: fx.Node) -> Step:
    if node.op == "get_attr":
        return Constant(node.name, attribute(lowering.module, str(node.target)))
    call, sizes, device = call_of(node), lowering.sizes, lowering.target.device
    return view_of(call, node, sizes, device) or through_c(call, node, sizes, device)


def _with_frees(steps: list[Step], inputs: list[str], output: fx.Node) -> list[Step]:
    """`steps` with every value freed behind its last reader, and behind those of its views."""
    returned = {node.name for node in output.all_input_nodes}
    last: dict[str, int] = dict.fromkeys(inputs, -1)
    for number, step in enumerate(steps):
        for name in (*step.makes, *step.takes):
            last[name] = number
    for step in reversed(steps):
        if isinstance(step, View):
            ends = len(steps) if step.made.name in returned else last[step.made.name]
            last[step.source] = max(last[step.source], ends)
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
