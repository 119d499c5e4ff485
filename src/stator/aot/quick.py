"""A quick trace, of programs that write to nothing that others may see.

One mode over fake tensors notes each operator that reaches it: no functionalization, no proxies,
and a quarter of their time.  Autograd may be on top of it.  Whatever is not that simple is left to
the full trace, which records the same nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.aot.backward import (
    carry_lines,
    history,
    is_custom,
    placeholders_first,
    plan_tangent,
    tangent_like,
    tangent_name,
)
from stator.aot.memo import twin_of
from stator.aot.metadata import InputFact, Mutation, OutputFact, Program, Source, ValueFact
from stator.aot.recorder import NotQuickError, Recorder
from stator.aot.subclasses import PLAIN
from stator.core.torch_types import Flat
from stator.graph.edit import draws_numbers
from stator.graph.generators import gpus_of
from stator.torch_api import (
    FakeTensor,
    autocast_off,
    autocast_state,
    preserve_version,
    storage_of,
    version_of,
)

SYMBOLS: Final = "sizes are symbols"


def why_not_quick(inputs: Sequence[Any]) -> str | None:
    """None if inputs are plain fake tensors, each once, of sizes that are numbers; or what else."""
    odd = next((v for v in inputs if type(v) not in (FakeTensor, torch.nn.Parameter)), None)
    if isinstance(odd, torch.SymInt):
        return SYMBOLS
    if odd is not None:
        return f"an input is of type {type(odd).__name__}"
    if len({id(value) for value in inputs}) < len(inputs):
        return "an input is given twice"
    if torch.is_inference_mode_enabled() or any(value.is_inference() for value in inputs):
        return "it is traced in inference mode"
    if autocast_state():
        return "autocast is on"
    if any(value.layout is not torch.strided for value in inputs):
        return "an input is sparse"
    numbers = (n for value in inputs for n in (*value.size(), value.storage_offset()))
    return None if all(isinstance(number, int) for number in numbers) else SYMBOLS


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a program was traced to."""

    graph: fx.Graph
    program: Program
    primals: list[fx.Node]
    tangents: list[fx.Node]
    updated: list[int]  # positions of primals that the graph itself writes to


def record(function: Flat, inputs: Sequence[torch.Tensor]) -> Recorded | str:
    """Run a program on fake tensors, and its backward; the reason if that takes more than this.

    The program may run again: it has no effects beyond its tensors.
    """
    grad_mode = torch.is_grad_enabled()
    try:
        with preserve_version(tuple(inputs)):  # which fakes of them share
            return _Quick(inputs).record(function)
    except Exception as error:  # what is wrong with the program, if anything is, the full one says
        kind = "" if isinstance(error, NotQuickError) else f"{type(error).__name__}: "
        return kind + str(error).partition("\n")[0]  # the interpreter adds where it was
    finally:
        torch.set_grad_enabled(grad_mode)


class _Quick:
    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.given = inputs
        self.inputs = [_entered(value) for value in inputs]
        self.recorder = Recorder(self.inputs)
        self.outputs: list[OutputFact] = []
        self.values: list[torch.Tensor] = []  # outputs that the graph computes, each once
        self.returned: list[int] = []  # for each of them, the output that it is

    def record(self, function: Flat) -> Recorded:
        """Forward and backward, as one graph."""
        recorder, graph = self.recorder, self.recorder.graph
        primals = [recorder.node_of(value) for value in self.inputs]
        versions = [version_of(value) for value in self.inputs]
        grad_mode = torch.is_grad_enabled()
        with recorder:
            outputs = list(function(*self.inputs))
        if torch.is_grad_enabled() != grad_mode:
            raise NotQuickError("the program changes the grad mode")
        self._sort(outputs)
        inputs = tuple(map(self._input_fact, self.given, self.inputs, versions))
        for node in graph.nodes:
            node.meta["in_forward"] = True
        values = [recorder.node_of(value) for value in self.values]
        now = [recorder.node_of(value) for value in self.inputs]
        tracked = [value for value in self.values if value.grad_fn is not None]
        tangents, grads = self._backward(tracked) if tracked else ([], [None] * len(primals))
        drawing = [node for node in graph.nodes if draws_numbers(node)]
        program = Program(
            inputs,
            tuple(self.outputs),
            tuple(map(_value_fact, self.values, self.returned)),
            tuple(plan_tangent(value, PLAIN) for value in tracked),
            tuple(None if grad is None else PLAIN for grad in grads),
            grad_mode_after=None,
            draws_random=bool(drawing),
            draws_on=gpus_of(drawing),
        )
        recorder.finish()
        graph.output((values, now, [], [grad for grad in grads if grad is not None]))
        placeholders_first(graph)
        updated = [index for index, node in enumerate(now) if node is not primals[index]]
        return Recorded(graph, program, primals, tangents, updated)

    def _input_fact(self, given: torch.Tensor, value: torch.Tensor, version: int) -> InputFact:
        written = id(value) in self.recorder.written
        if written and value.requires_grad:
            raise NotQuickError("an input has history now")
        return InputFact(
            requires_grad=given.requires_grad,
            is_leaf=given.is_leaf,
            mutation=Mutation.IN_GRAPH if written else Mutation.NONE,
            bumps=written and version_of(value) != version,
        )

    def _backward(
        self, tracked: Sequence[torch.Tensor]
    ) -> tuple[list[fx.Node], list[fx.Node | None]]:
        """Nodes of the tangents of these values; for each input that of its gradient, or None."""
        wanted = [value for value in self.inputs if value.requires_grad]
        behind = list(history(tracked))
        if not wanted or any(map(is_custom, behind)):
            raise NotQuickError("a derivative of the user's, or of nothing that came in")
        tangents = [tangent_like(value) for value in tracked]
        nodes = [self.recorder.enter(one, tangent_name(self.recorder.graph)) for one in tangents]
        carry_lines(behind, self.recorder.graph)
        with self.recorder, autocast_off():  # eager differentiates outside of autocast
            found = iter(torch.autograd.grad(tracked, wanted, tangents, allow_unused=True))
        grads = [next(found) if value.requires_grad else None for value in self.inputs]
        return nodes, [None if grad is None else self.recorder.node_of(grad) for grad in grads]

    def _sort(self, outputs: Sequence[Any]) -> None:
        """Find where each output comes from; none shares memory with an input or another."""
        firsts = {id(value): number for number, value in reversed(list(enumerate(outputs)))}
        places = {id(value): number for number, value in enumerate(self.inputs)}
        taken = set(self.recorder.given)
        for number, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, bool | int | float | str | None):
                    raise NotQuickError(f"an output is a {type(value).__name__}")
                self.outputs.append(OutputFact(Source.CONSTANT, constant=value))
                continue
            trains = value.requires_grad
            if id(value) in places:
                self.outputs.append(OutputFact(Source.INPUT, places[id(value)], trains))
            elif firsts[id(value)] < number:
                self.outputs.append(OutputFact(Source.OUTPUT, firsts[id(value)], trains))
            elif storage_of(value) in taken:
                raise NotQuickError("outputs share memory")
            else:
                taken.add(storage_of(value))
                self.outputs.append(OutputFact(Source.GRAPH, len(self.values), trains))
                self.values.append(value)
                self.returned.append(number)


def _value_fact(value: torch.Tensor, output: int) -> ValueFact:
    return ValueFact(PLAIN, differentiable=value.grad_fn is not None, of_output=output)


def _entered(value: torch.Tensor) -> torch.Tensor:
    """An input as the program sees it: with grad mode on, a tensor of its own, and a leaf."""
    if not torch.is_grad_enabled():
        return value
    with torch.no_grad():
        return twin_of(value).requires_grad_(value.requires_grad)
