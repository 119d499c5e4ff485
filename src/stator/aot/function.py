"""A training program as a torch.autograd.Function, differentiable as often as asked.

The first derivative runs the compiled backward graph on saved values.  Where its result must be
differentiable itself (`create_graph=True`), the gradients are computed from the primals instead:
that computation is a program like any other (see higher.py), and is compiled on demand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from stator.aot.higher import GradientProgram, by_input, settled
from stator.aot.metadata import InputFact, Mutation, Program, TangentPlan
from stator.aot.partition.split import Kept, Split
from stator.aot.partition.undefined import mark_tangents, without_tangents
from stator.aot.subclasses import tensor_count, tensor_parts, width
from stator.aot.trace import Traced
from stator.aot.wrappers import Call, Writer, training_call
from stator.core.torch_types import Boxed, Flat
from stator.graph.edit import needed_by
from stator.torch_api import (
    BELOW_AUTOGRAD,
    autocast_state,
    below_autograd,
    hidden_from_dynamo,
    keeps_graph,
    set_eval_frame,
    version_of,
)

CompileGraph = Callable[[fx.GraphModule, str], Boxed]


class Compilers(Protocol):
    """What compiles the parts of a program."""

    @property
    def compile_graph(self) -> CompileGraph:
        """A forward or backward graph."""
        ...

    def specialize(self, function: Flat, *, replays_random: bool = False) -> Flat:
        """A program, compiled for each new kind of arguments."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Say that something runs uncompiled; under `Options.strict`, raise."""
        ...


def training_function(function: Flat, traced: Traced, halves: Split, tools: Compilers) -> Call:
    """A function from the program's inputs to its outputs, with the compiled backward behind it."""
    program = traced.program
    needed = _inputs_behind(traced)
    cloned = [i for i in needed if _is_copied(program.inputs[i])]
    forward = _write_forward(traced, halves, tools.compile_graph(halves.forward, "forward"), needed)
    gradients = GradientProgram(function, program, autocast_state())
    backward = _Backward(traced, halves, tools, gradients, needed)
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward.__call__),
    }
    compiled: Any = type("Compiled", (torch.autograd.Function,), methods)
    return training_call(program, compiled.apply, cloned)


def _inputs_behind(traced: Traced) -> list[int]:
    """Inputs of the program that the gradients depend on."""
    owner = {}
    position = 0
    for index, fact in enumerate(traced.program.inputs):
        for _ in range(width(fact.layout)):
            owner[traced.primals[position]] = index
            position += 1
    behind = needed_by(grad for grad in traced.grads if isinstance(grad, fx.Node))
    return sorted({owner[node] for node in behind if node in owner})


def _write_forward(traced: Traced, halves: Split, graph: Boxed, needed: list[int]) -> Any:
    program = traced.program
    writer = Writer(program)
    source = writer.source
    source.names |= {"get_rng_state": torch.get_rng_state, "version_of": version_of}
    writer.open("forward", ["ctx", "clones", *(f"x{i}" for i in range(len(program.inputs)))])
    if program.draws_random:
        source.add("ctx.random_state = get_rng_state()")
    extras = sum(saved.kept is Kept.EXTRA for saved in halves.saved)
    values = writer.plain_values()
    writer.run_graph(graph, values + [f"e{i}" for i in range(extras)])
    inputs = writer.plain_inputs()
    names = {Kept.PRIMAL: inputs, Kept.VALUE: values, Kept.EXTRA: [f"e{i}" for i in range(extras)]}
    tensors = [names[s.kept][s.index] for s in halves.saved if s.is_tensor]
    numbers = [names[s.kept][s.index] for s in halves.saved if not s.is_tensor]
    source.add(f"ctx.save_for_backward({', '.join(tensors)})")
    source.add(f"ctx.numbers = ({''.join(number + ', ' for number in numbers)})")
    _keep_primals(source, program, needed)
    writer.rebuild_values()
    _keep_sizes(source, program)
    plain = [i for i, v in enumerate(program.values) if not v.differentiable]
    tensors_only = "".join(f"v{i}, " for i in plain)
    source.add(f"ctx.mark_non_differentiable(*(v for v in ({tensors_only}) if is_tensor(v)))")
    source.names["is_tensor"] = torch.is_tensor
    source.add("ctx.set_materialize_grads(False)")
    source.add(f"return ({''.join(f'v{i}, ' for i in range(len(program.values)))})")
    return writer.load("forward")


def _keep_primals(source: Any, program: Program, needed: list[int]) -> None:
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

    traced: Traced
    halves: Split
    tools: Compilers
    gradients: GradientProgram
    needed: list[int]
    graphs: dict[tuple[bool, ...], _Loaded] = field(default_factory=dict)
    higher: dict[tuple[bool, ...], Flat] = field(default_factory=dict)

    @hidden_from_dynamo
    def __call__(self, ctx: Any, *given: Any) -> tuple[Any, ...]:
        before = set_eval_frame(None)  # a backward may run in the middle of what Dynamo compiles
        try:
            return self._run(ctx, given)
        finally:
            set_eval_frame(before)

    def _run(self, ctx: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        program = self.traced.program
        tangents = [
            tangent
            for tangent, value in zip(given, program.values, strict=True)
            if value.differentiable
        ]
        if self.traced.backward_error is not None:
            raise RuntimeError(str(self.traced.backward_error))
        missing = tuple(tangent is None for tangent in tangents)
        if all(missing):
            return (None,) * (1 + len(program.inputs))
        if torch.is_grad_enabled():
            return self._differentiable(ctx, tangents, missing)
        loaded = self.graphs.get(missing) or self._load(missing)
        arguments = list(ctx.saved_tensors)
        arguments += ctx.numbers
        ctx.maybe_clear_saved_tensors()
        if not keeps_graph():
            ctx.primals = ctx.versions = None
        for index in loaded.tangents:
            plan, tangent = program.tangents[index], tangents[index]
            if tangent is None:
                tangent = torch.zeros(ctx.sizes[index], **loaded.like[index])
            arguments += tensor_parts(settled(tangent, plan), plan.layout)
        del tangents, given
        with below_autograd(BELOW_AUTOGRAD):
            grads = loaded.run(arguments)
        return (None, *by_input(program, grads))

    def _load(self, missing: tuple[bool, ...]) -> _Loaded:
        assert self.halves.backward is not None, "a program with tangents has a backward"
        module = copy.copy(self.halves.backward)
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        placeholders = graph.find_nodes(op="placeholder")[len(self.halves.saved) :]
        groups = _grouped(self.traced.program.tangents, placeholders)
        mark_tangents(graph, placeholders)
        if not self.traced.custom_backward:  # a derivative of the user's gets zeros, as in eager
            _prune(graph, groups, missing)
        present = [i for i, group in enumerate(groups) if not missing[i] or _is_read(group)]
        for index, group in enumerate(groups):
            if index not in present:
                for node in group:
                    graph.erase_node(node)
        like = {
            i: {"dtype": group[0].meta["val"].dtype, "device": group[0].meta["val"].device}
            for i, group in enumerate(groups)
        }
        run = self._compiled(fx.GraphModule(module, graph, "Backward"))
        self.graphs[missing] = loaded = _Loaded(run, present, like)
        return loaded

    def _compiled(self, module: fx.GraphModule) -> Boxed:
        """The graph compiled; if that fails, executed as it is."""
        try:
            return self.tools.compile_graph(module, "backward")
        except Exception as error:
            self.tools.on_failure(error)
            return lambda arguments: module(*arguments)

    def _differentiable(
        self, ctx: Any, tangents: list[Any], missing: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Gradients that can be differentiated again, from the primals."""
        if ctx.primals is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed)."
            )
        _check_versions(ctx, self.needed)
        if missing not in self.higher:
            self.higher[missing] = self.tools.specialize(
                self.gradients.without(missing),
                replays_random=self.traced.program.draws_random,
            )
        arguments = [*ctx.primals]
        arguments += [tangent for tangent in tangents if tangent is not None]
        if not self.traced.program.draws_random:
            grads = self.higher[missing](*arguments)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(ctx.random_state)
                grads = self.higher[missing](*arguments)
        if not keeps_graph():
            ctx.primals = ctx.versions = None
        return (None, *grads)


@dataclass(frozen=True, slots=True)
class _Loaded:
    run: Boxed
    tangents: list[int]  # those that the graph reads
    like: dict[int, dict[str, Any]]


def _grouped(plans: Sequence[TangentPlan], nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Placeholders by tangent: a subclass has several, its numbers have none."""
    stream = iter(nodes)
    return [[next(stream) for _ in range(tensor_count(plan.layout))] for plan in plans]


def _prune(graph: fx.Graph, groups: list[list[fx.Node]], missing: tuple[bool, ...]) -> None:
    if any(missing):
        absent = [n for group, gone in zip(groups, missing, strict=True) if gone for n in group]
        without_tangents(graph, absent)


def _is_read(group: list[fx.Node]) -> bool:
    return any(node.users for node in group)


def _check_versions(ctx: Any, needed: Sequence[int]) -> None:
    now = _versions([ctx.primals[i] for i in needed])
    if now != ctx.versions:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of the compiled function is at versions {now}; expected "
            f"{ctx.versions} instead."
        )
