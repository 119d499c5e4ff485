"""Text of every stage below the graph, for dumps: loops, schedule, kernels, LLVM, program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from stator.codegen.llvm import jit
from stator.codegen.llvm.shape import arguments_of
from stator.codegen.triton.shape import Shape
from stator.core.torch_types import Boxed
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import Accumulate, Accumulated, Kernel, Stage, Store
from stator.loops.text import to_text
from stator.loops.values import product
from stator.lower.items import Check, Compute, Extern, Item, Scatter, Size
from stator.runtime.plan import Call, Launch, Plan, Step, Together
from stator.schedule.fuse import Fused, Group

# --- what lowering left ---


def loops_text(items: Sequence[Item]) -> str:
    """Each buffer with the loops that compute it, each call with the reason why it is one."""
    return "\n".join(_item(item) for item in items)


def _item(item: Item) -> str:
    match item:
        case Compute():
            size = ", ".join(str(length) for length in item.size)
            stride = ", ".join(str(step) for step in item.stride)
            head = f"{item.name}: {item.buffer.dtype!r}[{size}], strides [{stride}]"
            return "\n".join((head, *_loops(_compute_loops(item)))) + "\n"
        case Scatter():
            axes = _numbered(item.axes, "u")
            place: dict[Leaf, Index] = {old: Index.of(new) for old, new in axes.items()}
            store = Store(
                item.buffer, item.index.replaced(place), item.value.replaced(place), item.combine
            )
            kernel = Kernel(item.name, (), (Stage(tuple(axes.values()), (store,), in_order=True),))
            return "\n".join((f"scatter into {item.name}", *_loops(kernel))) + "\n"
        case Check():
            return f"check {item.flag}: {item.error.__name__} unless 0: {item.message}\n"
        case Size():
            return f"size {item.name} = {item.index}\n"
        case Extern():
            return f"{_call(item.node)}\n" + (f"  {item.reason}\n" if item.reason else "")


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"take {node.name} = {node.target}"
    return f"torch runs {Call(node.name, node.target, node.args, dict(node.kwargs))}"


def _loops(kernel: Kernel) -> Iterator[str]:
    """The loops alone: names and types of buffers stand where they are made."""
    head = ("kernel ", "  buffer ", "  size ")
    return (line for line in to_text(kernel).splitlines() if not line.startswith(head))


def _compute_loops(item: Compute) -> Kernel:
    """The loops of one item by themselves, as a kernel."""
    outer, inner = _numbered(item.outer, "i"), _numbered(item.inner, "r")
    place: dict[Leaf, Index] = {old: Index.of(new) for old, new in (outer | inner).items()}
    where, value = item.store.replaced(place), item.value.replaced(place)
    rows = tuple(new for old, new in outer.items() if old is not item.scan)
    if item.combine is None:
        return Kernel(item.name, rows, (Stage((), (Store(item.buffer, where, value),)),))
    total = Accumulated(value.dtype, "total")
    accumulate = Accumulate(total.name, item.combine, value)
    store = Store(item.buffer, where, total)
    if item.scan is not None:
        along = (outer[item.scan],)
        return Kernel(item.name, rows, (Stage(along, (accumulate, store), in_order=True),))
    reduction = Stage(tuple(inner.values()), (accumulate,))
    return Kernel(item.name, rows, (reduction, Stage((), (store,))))


def _numbered(axes: Sequence[Axis], letter: str) -> dict[Axis, Axis]:
    return {axis: Axis(f"{letter}{number}", axis.size) for number, axis in enumerate(axes)}


# --- which loops run together ---


def schedule_text(fused: Fused) -> str:
    """Groups in the order in which they run, then why others are not one."""
    groups = [_group(number, group) for number, group in enumerate(fused.groups)]
    refusals = [f"  {reason}" for reason in fused.refusals] or ["  nothing"]
    return "\n".join([*groups, "not fused:", *refusals])


def _group(number: int, group: Group) -> str:
    match group.alone:
        case None:
            rows = product([axis.size for axis in group.rows[group.members[0].name]])
            head = f"group {number}: kernel_{number}, rows: {rows}"
            return "\n".join((head, *(_member(member, group) for member in group.members)))
        case Scatter():
            return f"group {number}: kernel_{number}, scatter into {group.alone.name}"
        case _:
            return f"group {number}: {_item(group.alone).splitlines()[0]}"


def _member(member: Compute, group: Group) -> str:
    axes = _numbered(member.outer, "i")
    along = ", ".join(axes[axis].name for axis in group.rows[member.name])
    what = "scans" if member.scan is not None else "reduces" if member.inner else "maps"
    return f"  {member.name} {what}, " + (f"rows along {along}" if along else "all in one row")


# --- kernels ---


def kernels_text(kernels: Sequence[Kernel]) -> str:
    """The loop IR of every kernel."""
    return "\n".join(to_text(kernel) for kernel in kernels)


def llvm_text(steps: Sequence[Step]) -> str:
    """LLVM's text before it is optimized, headed by what its names stand for in the graph."""
    return "\n".join((*_legend(steps, "; "), jit.module_text(_compiled(steps))))


def assembly_text(steps: Sequence[Step]) -> str:
    """What LLVM made of it for this machine."""
    return "\n".join((*_legend(steps, "# "), jit.assembly(_compiled(steps))))


def triton_text(steps: Sequence[Step], shapes: Mapping[Kernel, Shape]) -> str:
    """The Triton source of every kernel, headed the same way; those in `shapes` were tuned."""
    from stator.codegen.triton.kernel import source_of  # for GPUs alone

    sources = (
        f"# {name}\n{source_of(replace(nameless, name=name), shapes.get(nameless))}"
        for nameless, name in _first_names(steps).items()
    )
    return "\n".join((*_legend(steps, "# "), *sources))


def _compiled(steps: Sequence[Step]) -> list[Kernel]:
    """What is compiled: equal kernels once, under the first one's name."""
    return [replace(nameless, name=name) for nameless, name in _first_names(steps).items()]


def _first_names(steps: Sequence[Step]) -> dict[Kernel, str]:
    """For all code that steps run, the name in the graph of the first kernel that it is."""
    first: dict[Kernel, str] = {}
    for step, launch in _launches(steps):
        first.setdefault(step.nameless, launch.kernel.name)
    return first


def _launches(steps: Sequence[Step]) -> Iterator[tuple[Launch | Together, Launch]]:
    """Every launch, and the step that it is part of."""
    for step in steps:
        if isinstance(step, Launch):
            yield step, step
        elif isinstance(step, Together):
            yield from ((step, launch) for launch in step.launches)


def _legend(steps: Sequence[Step], mark: str) -> Iterator[str]:
    first = _first_names(steps)
    for step, launch in _launches(steps):
        own = [buffer.name for buffer in arguments_of(step.nameless)]
        names = [f"{a} = {b}" for a, b in zip(own, launch.arguments, strict=True)]
        names += [f"n{number:03} = {size}" for number, size in enumerate(launch.sizes)]
        name, same = launch.kernel.name, first[step.nameless]
        yield f"{mark}{name}{'' if same == name else f' is {same}'}: {', '.join(names)}"


# --- the program ---


def program_text(plan: Plan, run: Boxed) -> str:
    """The Python that runs the plan, headed by what its names stand for."""
    names: Mapping[str, object] = getattr(run, "__globals__", {})
    first = _first_names(plan.steps)
    entries = {id(entry.function): first[kernel] for kernel, entry in plan.entries.items()}
    legend = [
        f"# {name}: {entries.get(id(value)) or _object(value)}"
        for name, value in names.items()
        if name.startswith("_") and not name.startswith("__")
    ]
    return "\n".join((*legend, inspect.getsource(run)))


def _object(value: object) -> str:
    """An object without its address in memory."""
    kind = type(value).__name__
    named = f"{kind} {getattr(value, '__name__', '')}".rstrip()
    return named if " at 0x" in repr(value) else repr(value)
