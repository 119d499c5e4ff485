"""One compiled graph as plain data: kernels, calls, what was not fused, memory, times."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from stator.codegen.llvm.entry import emit_kernel
from stator.codegen.llvm.writer import numbered
from stator.codegen.triton.kernel import source_of
from stator.core.events import Details
from stator.graph.text import operator_name
from stator.loops.ir import Buffer, Kernel, Load, Store, loads_of
from stator.loops.text import to_text
from stator.loops.values import product
from stator.lower.items import Extern
from stator.lower.sizes import evaluate
from stator.runtime.memory import arena_bytes, lifetimes, predicted
from stator.runtime.native.watch import Times
from stator.runtime.origins import Lowered, Origin, Programmed
from stator.runtime.plan import Call, Launch, Plan, Together

Data = dict[str, Any]

LONGEST: Final = 300  # characters of a step's text
NANOSECOND: Final = 1e-9


def half_report(name: str, details: Details) -> Data:
    """A forward or a backward."""
    return _Half(name, details.plans[name], details.lowered.get(name)).report()


@dataclass
class _Half:
    name: str
    programmed: Programmed
    lowered: Lowered | None  # None: nothing became loops

    @property
    def plan(self) -> Plan:
        return self.programmed.plan

    def report(self) -> Data:
        kernels = list(self._kernels())
        return {
            "name": self.name,
            "steps": [str(step)[:LONGEST] for step in self.plan.steps],
            "kernels": kernels,
            "language": "Triton" if self._is_triton else "LLVM",
            "code": [self._written(code, n) for n, code in enumerate(self._code)],
            "calls": list(self._calls()),
            "unfused": _distinct([*self._refusals(), *self._beside_calls()]),
            "memory": self._memory(),
        }

    # --- kernels ---

    @cached_property
    def _code(self) -> dict[Kernel, int]:
        """Kernels that differ, numbered."""
        launched = (step for step in self.plan.steps if isinstance(step, Launch | Together))
        return {code: n for n, code in enumerate(dict.fromkeys(s.nameless for s in launched))}

    @property
    def _is_triton(self) -> bool:
        return (
            self.plan.on_gpu if self.lowered is None else self.lowered.lowering.target.uses_triton
        )

    def _written(self, kernel: Kernel, number: int) -> str:
        """What a kernel is compiled from."""
        named = replace(kernel, name=f"code_{number}")
        if self._is_triton:
            return source_of(named, getattr(self.plan.entries.get(kernel), "shape", None))
        return numbered(emit_kernel(named))

    @cached_property
    def _origins(self) -> Mapping[str, Origin]:
        return self.plan.origins()

    def _kernels(self) -> Iterator[Data]:
        for number, step, launch in launches(self.plan):
            origin = self._origins.get(launch.kernel.name, Origin(()))
            shared = len(step.launches) if isinstance(step, Together) else 1
            yield {
                "name": launch.kernel.name,
                "step": number,
                "shared": shared,  # launches that run as one, and share the time
                "title": origin.title,
                "lines": list(origin.lines),
                "operators": [[node.name, operator_name(node)] for node in origin.nodes],
                "makes": [*launch.makes, *launch.writes],
                **traffic(launch.kernel, self.plan),
                "loops": to_text(launch.kernel),
                "code": self._code[step.nameless],
                **_times(self.programmed.times, number, shared),
            }

    # --- calls ---

    def _calls(self) -> Iterator[Data]:
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, Call):
                yield {
                    "name": step.name,
                    "operator": step.called,
                    "step": number,
                    "lines": [step.line] if step.line else [],
                    "why": self._why_called(step),
                    "function": step.symbol,
                    **_times(self.programmed.times, number, 1),
                }

    def _why_called(self, step: Call) -> str:
        if self.lowered is None:
            return "nothing of this graph became kernels"
        reason = self.lowered.lowering.reasons.get(step.name)
        if step.target is operator.getitem:
            return "a part of what another call returns"
        if reason is None:
            return "it looks at memory another way, and computes nothing"
        if reason != "no rule":
            return reason
        if step.symbol is not None:
            return "a library does it: loops of ours would be slower"
        return "no rule makes loops of it"

    # --- what was not fused ---

    def _refusals(self) -> Iterator[Data]:
        """Loops that were not let into a kernel that makes or reads the same."""
        if self.lowered is None:
            return
        homes = self._homes
        for refusal in self.lowered.fused.refused:
            pair = [homes.get(refusal.loop), homes.get(refusal.other)]
            names = [self._node(refusal.loop), self._node(refusal.other)]
            if pair[0] != pair[1]:
                yield {"kernels": pair, "nodes": names, "reason": refusal.reason}

    def _beside_calls(self) -> Iterator[Data]:
        """Kernels that read what a call makes, and calls that read what a kernel makes."""
        called = {
            step.name: step
            for step in self.plan.steps
            if isinstance(step, Call) and step.target is not operator.getitem
        }
        made = {name: one.kernel.name for _, _, one in launches(self.plan) for name in one.makes}
        for _, _, launch in launches(self.plan):
            for name in launch.takes:
                if name in called:
                    yield self._border(called[name], [None, launch.kernel.name], [name, None])
        for call in called.values():
            for name in dict.fromkeys(call.takes):
                if name in made:
                    yield self._border(call, [made[name], None], [name, call.name])

    def _border(self, call: Call, kernels: list[str | None], nodes: list[str | None]) -> Data:
        why = f"{call.called} is a call: {self._why_called(call)}"
        return {"kernels": kernels, "nodes": nodes, "reason": why}

    @cached_property
    def _homes(self) -> dict[str, str]:
        """The kernel of each loop."""
        assert self.lowered is not None, "there are loops"
        return {
            name: kernel.name
            for group, kernel in self.lowered.kernels.items()
            for name in _loops_of(group)
        }

    def _node(self, loop: str) -> str:
        """The node whose operator a loop is part of."""
        assert self.lowered is not None, "there are loops"
        maker = self.lowered.lowering.makers.get(loop)
        return loop if maker is None else str(maker.name)

    # --- memory ---

    def _memory(self) -> Data:
        plan, memory = self.plan, self.programmed.memory
        hint = partial(evaluate, known=plan.hints)
        buffers = [
            {
                "name": life.name,
                "bytes": life.bytes,
                "first": life.first,
                "last": life.last,
                "offset": None if life.offset is None else hint(life.offset),
                "torch": life.by_torch,
            }
            for life in lifetimes(plan, memory)
        ]
        peak = predicted(plan, memory).all
        return {"arena": arena_bytes(plan, memory), "peak": peak, "buffers": buffers}


def launches(plan: Plan) -> Iterator[tuple[int, Launch | Together, Launch]]:
    """Every launch, with the step that it is part of and that step's number."""
    for number, step in enumerate(plan.steps):
        if isinstance(step, Launch):
            yield number, step, step
        elif isinstance(step, Together):
            yield from ((number, step, launch) for launch in step.launches)


def _distinct(pairs: Sequence[Data]) -> list[Data]:
    """Each pair once: an operator may be several loops."""
    return list({json.dumps(pair): pair for pair in pairs}.values())


def _loops_of(group: Any) -> Sequence[str]:
    alone = [] if group.alone is None or isinstance(group.alone, Extern) else [group.alone.name]
    return [*alone, *(member.name for member in group.members)]


def traffic(kernel: Kernel, plan: Plan) -> dict[str, int]:
    """Bytes that a kernel reads and writes: of each buffer all, or what its loops visit if less."""
    hint = partial(evaluate, known=plan.hints)
    visited: dict[Buffer, int] = {}
    for statement in kernel.statements:
        touched = loads_of(statement.value)
        if isinstance(statement, Store):  # its own place, and what that is computed from
            touched += loads_of(Load(statement.value.dtype, statement.buffer, statement.index))
        for load in touched:
            places = hint(product([axis.size for axis in load.index.axes]))
            visited[load.buffer] = visited.get(load.buffer, 0) + places

    def bytes_of(buffers: Sequence[Buffer]) -> int:
        return sum(
            min(hint(buffer.size), visited.get(buffer, 0)) * buffer.dtype.bytes
            for buffer in buffers
        )

    shared = [old for _, old in kernel.shares]
    return {"read": bytes_of([*kernel.read, *shared]), "written": bytes_of(kernel.written)}


def _times(times: Times, number: int, shared: int) -> Data:
    """How often a step ran, and seconds: in all, and the fewest of one run."""
    count, total, least = times.step(number)
    return {
        "runs": count,
        "seconds": total * NANOSECOND / shared,
        "least": least * NANOSECOND / shared,
    }
