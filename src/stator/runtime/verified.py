"""Every kernel beside eager: the operators that it stands for, run by torch on the same inputs.

For `Options.verify="kernels"`.  Slow, and nothing dies before the call ends: a value that a later
kernel stores over is copied first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx

from stator.errors import WrongResult
from stator.graph.closeness import Worst, worst_element
from stator.graph.reference import SideBySide
from stator.graph.verify import user_line
from stator.ops import draws
from stator.runtime.plan import Launch, Plan, Step, Together, View
from stator.schedule.canonical import canonical
from stator.torch_api import StorageWeakRef, is_mutable_op

MOST_OPERATORS: Final = 12  # that an error names
aten: Final = torch.ops.aten
UNSET: Final = (
    *(aten.empty, aten.empty_like, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
)
# A kernel draws normal numbers in float32; what they are held against is the formula in float64.
NORMAL_ULPS: Final = 32
HINT: Final = (
    "`stator bisect script.py` finds the rewrite, `stator minify script.py` a smaller program; "
    "options={'kernels': False} runs without kernels"
)


@dataclass(slots=True)
class Watch:
    """Looks over the shoulder of a plan that runs, and raises at the first wrong kernel."""

    module: fx.GraphModule
    plan: Plan
    label: str
    values: dict[str, Any] = field(default_factory=dict)  # every node's value so far
    known: dict[str, Any] = field(default_factory=dict)  # the same before the last launch
    pending: dict[str, Launch] = field(default_factory=dict)  # results without a name so far
    compared: int = 0  # values, in all calls

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """A call begins."""
        self.values = dict(inputs)
        self.pending = {}

    def before(self, step: Step, taken: Mapping[str, Any]) -> None:
        """A step is about to run: what it will store over is copied."""
        written = {_memory(taken[name]) for name in step.writes if name in taken} - {None}
        for name, value in self.values.items():
            if _memory(value) in written:
                self.values[name] = value.detach().clone()
        self.known = dict(self.values)

    def after(self, step: Step, now: Mapping[str, Any]) -> None:
        """A step has run."""
        self.values |= {name: now[name] for name in step.makes}
        if isinstance(step, View) and step.made.name in self.pending:
            self._compare(self.pending.pop(step.made.name), step.made.name, now[step.made.name])
        for launch in _launches(step):
            self._look_at(launch, now)

    def end(self) -> None:
        """The call is over."""
        self.values, self.known = {}, {}

    def _look_at(self, launch: Launch, now: Mapping[str, Any]) -> None:
        written = {buffer for buffer in launch.kernel.written if self._is_last(launch, buffer.name)}
        later = {step.made.name for step in self.plan.steps if isinstance(step, View)}
        buffers = canonical(launch.kernel).buffers
        for buffer, name in zip(buffers, launch.arguments, strict=True):
            if buffer not in written:
                continue
            if buffer.name != name and buffer.name in later:  # stored over a value that dies
                self.pending[buffer.name] = launch
            else:
                self._compare(launch, buffer.name, now[name])

    def _is_last(self, launch: Launch, name: str) -> bool:
        """Whether no other kernel stores into the same value: a scatter adds to what lies there."""
        launches = [one for step in self.plan.steps for one in _launches(step)]
        writers = [one for one in launches if any(b.name == name for b in one.kernel.written)]
        return writers[-1] is launch

    def _compare(self, launch: Launch, name: str, ours: Any) -> None:
        node = next((node for node in self.module.graph.nodes if node.name == name), None)
        nodes = None if node is None else self._behind(node)
        if node is None or not nodes:
            return  # a part of an operator: whoever reads it is compared
        beside = SideBySide(self.module, self.module.graph)
        by_name = {known.name: known for known in self.module.graph.nodes}
        sources = {source for one in nodes for source in one.all_input_nodes} - set(nodes)
        given = {by_name[one.name]: self.known[one.name] for one in sources}
        with torch.no_grad():
            beside.run_between(given, nodes)
        self.compared += 1
        ulps = NORMAL_ULPS if any(one.target is draws.normal for one in nodes) else 1
        worst = worst_element(ours, beside.env[node], beside.exact[node], ulps)
        if worst is not None:
            raise self._error(launch, node, nodes, worst)

    def _behind(self, node: fx.Node) -> list[fx.Node] | None:
        """The nodes that lead from known values to `node`; None if one of them tells nothing."""
        found, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source.name not in self.known and source not in found:
                    found.add(source)
                    stack.append(source)
        if any(one.op == "placeholder" or _is_open(one.target) for one in found):
            return None
        return [one for one in self.module.graph.nodes if one in found]

    def _error(
        self, launch: Launch, node: fx.Node, nodes: Iterable[fx.Node], worst: Worst
    ) -> WrongResult:
        called = [_operator(one) for one in nodes if one.op == "call_function"]
        shown = ", ".join(dict.fromkeys(called[-MOST_OPERATORS:]))
        more = f" and {len(called) - MOST_OPERATORS} more" if len(called) > MOST_OPERATORS else ""
        lines = [user_line(one) for one in (node, *reversed(list(nodes)))]
        return WrongResult(
            f"{self.label}: {launch.kernel.name} gives {node.name} another value than eager: "
            f"{worst} (it stands for {shown}{more})",
            where=next((line for line in lines if line is not None), None),
            hint=HINT,
        )


def _is_open(target: Any) -> bool:
    """Whether to run it again would not give the same: it writes, or what it returns is unset."""
    return is_mutable_op(target) or getattr(target, "overloadpacket", None) in UNSET


def _operator(node: fx.Node) -> str:
    is_function = isinstance(node.target, FunctionType)
    return str(getattr(node.target, "__name__", "") if is_function else node.target)


def _launches(step: Step) -> tuple[Launch, ...]:
    if isinstance(step, Together):
        return step.launches
    return (step,) if isinstance(step, Launch) else ()


def _memory(value: Any) -> Any:
    """What tells whether two tensors share their storage."""
    if not isinstance(value, torch.Tensor) or value.is_mkldnn:
        return None
    return StorageWeakRef(value.untyped_storage())
