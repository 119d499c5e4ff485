"""Where kernels come from: the operators inside of each, and the user's lines."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import DEBUG
from pathlib import PurePath
from typing import Any, Final

from torch import fx

from stator.core.events import Compilation
from stator.core.logs import logger
from stator.graph.verify import user_line
from stator.loops.ir import Kernel
from stator.lower.items import Scatter
from stator.lower.lower import Lowering
from stator.ops import table
from stator.runtime.memory import Memory
from stator.runtime.plan import Call, Launch, Plan, Step, Together
from stator.schedule.fuse import Fused, Group

FUSION: Final = logger("fusion")
CALLS: Final = logger("calls")
KERNELS: Final = logger("kernels")

MOST_NAMES: Final = 5  # operators in a title


@dataclass(frozen=True, slots=True)
class Origin:
    """The operators that a kernel computes."""

    nodes: tuple[fx.Node, ...]  # in the order of the graph

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines, that of most operators first; those of mere views behind."""
        ordered = (*self._computing, *self.nodes)
        counted = Counter(line for node in ordered if (line := user_line(node)) is not None)
        return tuple(line for line, _ in counted.most_common())

    @property
    def title(self) -> str:
        """What it computes, in short: operators by their names, each once."""
        names = [str(node.target).removeprefix("aten.").split(".")[0] for node in self._computing]
        names = list(dict.fromkeys(names))
        rest = ["…"] if len(names) > MOST_NAMES else []
        return "+".join([*names[:MOST_NAMES], *rest])

    @property
    def _computing(self) -> Sequence[fx.Node]:
        """Those that are not just views, unless all are."""
        found = [
            node
            for node in self.nodes
            if node.target not in table.VIEW_RULES and node.target is not operator.getitem
        ]
        return found or self.nodes


@dataclass(frozen=True, slots=True)
class Lowered:
    """How a graph became kernels: kept where an explanation is asked for."""

    lowering: Lowering
    fused: Fused
    kernels: Mapping[Group, Kernel]

    def note(self, name: str, record: Compilation) -> None:
        """Tell the record, and the log, why loops did not become one, and operators no loops."""
        refusals, reasons = self.fused.refusals, self.lowering.reasons
        record.notes += [f"{name}: not fused: {reason}" for reason in refusals]
        record.notes += [f"{name}: {node} stays with torch: {why}" for node, why in reasons.items()]
        if record.details is not None:
            record.details.lowered[name] = self
        for refusal in refusals:
            FUSION.debug("%s: not fused: %s", name, refusal)
        for node, why in reasons.items():
            CALLS.debug("%s: %s stays with torch: %s", name, node, why)
        if KERNELS.isEnabledFor(DEBUG):
            for kernel, origin in self.origins().items():
                KERNELS.debug("%s: %s", name, _kernel_label(kernel, origin))

    def origins(self) -> dict[str, Origin]:
        """Where each kernel comes from, by its name."""
        order = {node: number for number, node in enumerate(self.lowering.module.graph.nodes)}
        named = {node.name: node for node in order}
        found: dict[str, Origin] = {}
        for group, kernel in self.kernels.items():
            members = [group.alone.name] if isinstance(group.alone, Scatter) else []
            members += [member.name for member in group.members]
            makers = [self.lowering.makers.get(name) or named.get(name) for name in members]
            inside = _inlined([maker for maker in makers if maker is not None], self.lowering)
            found[kernel.name] = Origin(tuple(sorted(inside, key=order.__getitem__)))
        return found


def _inlined(roots: Iterable[fx.Node], lowering: Lowering) -> set[fx.Node]:
    """`roots` and what is computed on the way to them: operators that are not in memory."""
    inside = {root for root in roots if root.op == "call_function"}
    stack = list(inside)
    while stack:
        for source in stack.pop().all_input_nodes:
            computed = source.op == "call_function" and source not in lowering.real
            if computed and source not in inside:
                inside.add(source)
                stack.append(source)
    return inside


@dataclass(slots=True)
class Programmed:
    """A finished plan, and how long its steps took: kept where an explanation is asked for."""

    plan: Plan
    memory: Memory
    times: Any  # runtime.native.watch.Times


def labels_of(plan: Plan) -> dict[int, str]:
    """Names for the steps that take time: kernel or operator, and the user's line."""
    origins = plan.origins()
    found: dict[int, str] = {}
    for number, step in enumerate(plan.steps):
        label = _label(step, origins)
        if label is not None:
            found[number] = label
    return found


def _label(step: Step, origins: Mapping[str, Origin]) -> str | None:
    match step:
        case Launch():
            return _kernel_label(step.kernel.name, origins.get(step.kernel.name))
        case Together():
            name = step.launches[0].kernel.name
            return f"{_kernel_label(name, origins.get(name))} × {len(step.launches)}"
        case Call():
            return f"{step.called}{_place([step.line] if step.line else [])}"
        case _:
            return None


def _kernel_label(name: str, origin: Origin | None) -> str:
    if origin is None:
        return name
    return f"{name} {origin.title}{_place(origin.lines)}"


def _place(lines: Iterable[str]) -> str:
    """The first line, its file by the name alone."""
    first = next(iter(lines), None)
    return "" if first is None else f" ({PurePath(first).name})"
