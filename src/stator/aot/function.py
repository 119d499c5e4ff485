"""A training program as a torch.autograd.Function, differentiable as often as asked.

The first derivative runs the compiled backward graph on saved values.  Where its result must be
differentiable itself (`create_graph=True`), the gradients are computed from the primals instead:
that computation is a program like any other (see higher.py), and is compiled on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stator.aot.higher import GradientProgram, by_input, settled
from stator.aot.metadata import Facts, InputFact, Kept, Mutation, Program
from stator.aot.subclasses import tensor_parts
from stator.aot.wrappers import Call, Writer, training_call
from stator.core.torch_types import Boxed, Flat
from stator.graph.generators import preserved, restore, states
from stator.torch_api import (
    BELOW_AUTOGRAD,
    autocast_state,
    below_autograd,
    hidden_from_dynamo,
    is_sole,
    keeps_graph,
    set_eval_frame,
    version_of,
)


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """A backward graph for one set of tangents, as a function."""

    run: Boxed
    tangents: tuple[int, ...]  # those that the graph reads
    like: tuple[tuple[torch.dtype, torch.device], ...]  # of all of them
    overwrites: tuple[int, ...] = ()  # saved values that it stores over


@dataclass(frozen=True, slots=True)
class StoredBackward:
    """The same as data."""

    image: Any
    tangents: tuple[int, ...]
    like: tuple[tuple[torch.dtype, torch.device], ...]
    overwrites: tuple[int, ...] = ()


class BackwardGraphs(Protocol):
    """Where backward graphs come from."""

    def backward(self, missing: tuple[bool, ...]) -> BackwardGraph:
        """The graph for the tangents that are there."""
        ...


class Specializer(Protocol):
    """What compiles further programs."""

    def specialize(self, function: Flat, *, replays_random: bool = False) -> Flat:
        """A program, compiled for each new kind of arguments."""
        ...


def training_function(
    function: Flat, facts: Facts, graph: Boxed, graphs: BackwardGraphs, tools: Specializer
) -> Call:
    """A function from the program's inputs to its outputs, with the compiled backward behind it."""
    program = facts.program
    cloned = [i for i in facts.needed if _is_copied(program.inputs[i])]
    forward = _write_forward(facts, graph)
    gradients = GradientProgram(function, program, autocast_state())
    backward = _Backward(facts, graphs, tools, gradients)
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward.__call__),
    }
    compiled: Any = type("Compiled", (torch.autograd.Function,), methods)
    return training_call(program, compiled.apply, cloned)


def _write_forward(facts: Facts, graph: Boxed) -> Any:
    program = facts.program
    writer = Writer(program)
    source = writer.source
    source.names |= {"random_states": states, "version_of": version_of}
    writer.open("forward", ["ctx", "clones", *(f"x{i}" for i in range(len(program.inputs)))])
    if program.draws_random:
        source.add(f"ctx.random_states = random_states({source.literal(program.draws_on)})")
    extras = sum(saved.kept is Kept.EXTRA for saved in facts.saved)
    values = writer.plain_values()
    writer.run_graph(graph, values + [f"e{i}" for i in range(extras)])
    # A backward may find what another one wrote: autograd is not to watch those.
    late = {f"x{i}" for i in program.written_late}
    inputs = [name + ".data" if name in late else name for name in writer.plain_inputs()]
    names = {Kept.PRIMAL: inputs, Kept.VALUE: values, Kept.EXTRA: [f"e{i}" for i in range(extras)]}
    tensors = [names[s.kept][s.index] for s in facts.saved if s.is_tensor]
    numbers = [names[s.kept][s.index] for s in facts.saved if not s.is_tensor]
    source.add(f"ctx.save_for_backward({', '.join(tensors)})")
    source.add(f"ctx.numbers = ({''.join(number + ', ' for number in numbers)})")
    _keep_primals(source, program, facts.needed)
    if program.written_late:
        source.add(f"ctx.written = ({''.join(f'x{i}, ' for i in program.written_late)})")
    writer.rebuild_values()
    _keep_sizes(source, program)
    plain = [i for i, v in enumerate(program.values) if not v.differentiable]
    tensors_only = "".join(f"v{i}, " for i in plain)
    source.add(f"ctx.mark_non_differentiable(*(v for v in ({tensors_only}) if is_tensor(v)))")
    source.names["is_tensor"] = torch.is_tensor
    source.add("ctx.set_materialize_grads(False)")
    source.add(f"return ({''.join(f'v{i}, ' for i in range(len(program.values)))})")
    return writer.load("forward")


def _keep_primals(source: Any, program: Program, needed: Sequence[int]) -> None:
    """Primals for higher derivatives; those that gradients depend on, with their version now."""
    primals = [
        f"clones.get({i}, x{i})" if _is_copied(fact) else f"x{i}"
        for i, fact in enumerate(program.inputs)
    ]
    source.add(f"ctx.primals = ({''.join(name + ', ' for name in primals)})")
    source.names["versions_of"] = _versions
    source.add(f"ctx.versions = versions_of(({''.join(primals[i] + ', ' for i in needed)}))")


def _is_copied(fact: InputFact) -> bool:
    return fact.requires_grad and fact.mutation in (Mutation.COPY, Mutation.COPY_AND_METADATA)


def _versions(values: Sequence[Any]) -> list[int]:
    return [version_of(value) for value in values if isinstance(value, torch.Tensor)]


def _keep_sizes(source: Any, program: Program) -> None:
    """Sizes of values whose tangents may have to be zeros of a size known only now."""
    if len(program.tangents) > 1:  # with one, it is there or there is no backward
        sizes = [f"v{i}.size()" for i, v in enumerate(program.values) if v.differentiable]
        source.add(f"ctx.sizes = ({''.join(size + ', ' for size in sizes)})")


@dataclass(slots=True)
class _Backward:
    """Runs gradients; compiles a graph when a new set of tangents first arrives."""

    facts: Facts
    source: BackwardGraphs
    tools: Specializer
    gradients: GradientProgram
    graphs: dict[tuple[bool, ...], BackwardGraph] = field(default_factory=dict)
    higher: dict[tuple[bool, ...], Flat] = field(default_factory=dict)

    @hidden_from_dynamo
    def __call__(self, ctx: Any, *given: Any) -> tuple[Any, ...]:
        before = set_eval_frame(None)  # a backward may run in the middle of what Dynamo compiles
        try:
            return self._run(ctx, given)
        finally:
            set_eval_frame(before)

    def _run(self, ctx: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        program = self.facts.program
        tangents = [
            tangent
            for tangent, value in zip(given, program.values, strict=True)
            if value.differentiable
        ]
        if self.facts.backward_error is not None:
            raise RuntimeError(self.facts.backward_error)
        missing = tuple(tangent is None for tangent in tangents)
        if all(missing):
            return (None,) * (1 + len(program.inputs))
        if torch.is_grad_enabled():
            return self._differentiable(ctx, tangents, missing)
        loaded = self.graphs.get(missing)
        if loaded is None:
            loaded = self.graphs[missing] = self.source.backward(missing)
        arguments = list(ctx.saved_tensors)
        arguments += ctx.numbers
        ctx.maybe_clear_saved_tensors()
        kept = keeps_graph()
        if not kept:
            ctx.primals = ctx.versions = None
        for place in loaded.overwrites:
            if kept or not is_sole(arguments, place):
                arguments[place] = arguments[place].clone()
        for index in loaded.tangents:
            plan, tangent = program.tangents[index], tangents[index]
            if tangent is None:
                dtype, device = loaded.like[index]
                tangent = torch.zeros(ctx.sizes[index], dtype=dtype, device=device)
            arguments += tensor_parts(settled(tangent, plan), plan.layout)
        del tangents, given
        with below_autograd(BELOW_AUTOGRAD):
            grads = loaded.run(arguments)
        _write_late(ctx, program, grads)
        return (None, *by_input(program, grads))

    def _differentiable(
        self, ctx: Any, tangents: list[Any], missing: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Gradients that can be differentiated again, from the primals."""
        if ctx.primals is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed)."
            )
        _check_versions(ctx, self.facts.needed)
        if missing not in self.higher:
            self.higher[missing] = self.tools.specialize(
                self.gradients.without(missing),
                replays_random=self.facts.program.draws_random,
            )
        arguments = [*ctx.primals]
        arguments += [tangent for tangent in tangents if tangent is not None]
        if not self.facts.program.draws_random:
            grads = self.higher[missing](*arguments)
        else:
            gpus = self.facts.program.draws_on
            with preserved(gpus):
                restore(gpus, ctx.random_states)
                grads = self.higher[missing](*arguments)
        if not keeps_graph():
            ctx.primals = ctx.versions = None
        return (None, *grads)


def _write_late(ctx: Any, program: Program, grads: Sequence[Any]) -> None:
    """Give inputs that the backward writes to their new values, which stand behind gradients."""
    if program.written_late:
        for target, value in zip(ctx.written, grads[-len(ctx.written) :], strict=True):
            target.copy_(value)


def _check_versions(ctx: Any, needed: Sequence[int]) -> None:
    now = _versions([ctx.primals[i] for i in needed])
    if now != ctx.versions:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of the compiled function is at versions {now}; expected "
            f"{ctx.versions} instead."
        )
