"""Text of every stage below the graph, for dumps: loops, schedule, kernels, LLVM, program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from stator.codegen.llvm import jit
from stator.codegen.llvm.shape import arguments_of
from stator.core.torch_types import Boxed
from stator.loops.index import Axis, Index, Leaf
from stator.loops.ir import Accumulate, Accumulated, Kernel, Stage, Store
from stator.loops.text import to_text
from stator.loops.values import product
from stator.lower.items import Check, Compute, Extern, Item, Scatter, Size
from stator.runtime.plan import Call, Launch, Plan, Together
from stator.schedule.canonical import Canonical
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


def distinct(kernels: Sequence[Kernel], nameless: Sequence[Canonical]) -> dict[str, Kernel]:
    """What is compiled: equal kernels once, under the first one's name."""
    first: dict[Kernel, str] = {}
    for kernel, found in zip(kernels, nameless, strict=True):
        first.setdefault(found.kernel, kernel.name)
    return {name: replace(found, name=name) for found, name in first.items()}


def llvm_text(kernels: Sequence[Kernel], nameless: Sequence[Canonical]) -> str:
    """LLVM's text before it is optimized, headed by what its names stand for in the graph."""
    compiled = distinct(kernels, nameless)
    return "\n".join((*_legend(kernels, nameless, "; "), jit.module_text(compiled.values())))


def assembly_text(kernels: Sequence[Kernel], nameless: Sequence[Canonical]) -> str:
    """What LLVM made of it for this machine."""
    compiled = distinct(kernels, nameless)
    return "\n".join((*_legend(kernels, nameless, "# "), jit.assembly(compiled.values())))


def _legend(kernels: Sequence[Kernel], nameless: Sequence[Canonical], mark: str) -> Iterator[str]:
    first: dict[Kernel, str] = {}
    for kernel, found in zip(kernels, nameless, strict=True):
        same = first.setdefault(found.kernel, kernel.name)
        arguments = zip(arguments_of(found.kernel), found.buffers, strict=True)
        names = [f"{own.name} = {buffer.name}" for own, buffer in arguments]
        names += [f"n{number:03} = {size}" for number, size in enumerate(found.sizes)]
        like = "" if same == kernel.name else f" is {same}"
        yield f"{mark}{kernel.name}{like}: {', '.join(names)}"


# --- the program ---


def program_text(plan: Plan, run: Boxed) -> str:
    """The Python that runs the plan, headed by what its names stand for."""
    names: Mapping[str, object] = getattr(run, "__globals__", {})
    entries = {id(entry): _first_name(plan, kernel) for kernel, entry in plan.entries.items()}
    legend = [
        f"# {name}: {entries.get(id(value)) or _object(value)}"
        for name, value in names.items()
        if name.startswith("_") and not name.startswith("__")
    ]
    return "\n".join((*legend, inspect.getsource(run)))


def _first_name(plan: Plan, nameless: Kernel) -> str:
    """The name in the graph of the first kernel that runs this code."""
    for step in plan.steps:
        if isinstance(step, Launch | Together) and step.nameless is nameless:
            return (step if isinstance(step, Launch) else step.launches[0]).kernel.name
    raise AssertionError("code is loaded for launches alone")


def _object(value: object) -> str:
    """An object without its address in memory."""
    kind = type(value).__name__
    named = f"{kind} {getattr(value, '__name__', '')}".rstrip()
    return named if " at 0x" in repr(value) else repr(value)
