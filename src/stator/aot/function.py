"""A training program as a torch.autograd.Function, differentiable as often as asked.

The first derivative runs the compiled backward graph on saved values.  Where its result must be
differentiable itself (`create_graph=True`), the gradients are computed from the primals instead: the
joint graph, less its forward values, is a program like any other, and is compiled on demand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stator.aot.metadata import Mutation, Program, TangentPlan
from stator.aot.partition.split import Kept, Split
from stator.aot.partition.undefined import mark_tangents, without_tangents
from stator.aot.subclasses import Plain, put_together, take_apart, tensor_count, tensor_parts, width
from stator.aot.trace import Traced
from stator.aot.wrappers import Call, Writer, training_call
from stator.core.torch_types import Boxed, Flat
from stator.graph.edit import drop_unread, needed_by
from stator.torch_api import (
    BELOW_AUTOGRAD,
    below_autograd,
    keeps_graph,
    version_of,
)

CompileGraph = Callable[[fx.GraphModule, str], Boxed]
Specialize = Callable[[Flat], Flat]  # a program that is compiled for each new kind of arguments


def training_function(
    traced: Traced, halves: Split, compile_graph: CompileGraph, specialize: Specialize
) -> Call:
    """A function from the program's inputs to its outputs, with the compiled backward behind it."""
    program = traced.program
    needed = _inputs_behind(traced)
    cloned = [
        i
        for i in needed
        if program.inputs[i].requires_grad
        and program.inputs[i].mutation in (Mutation.COPY, Mutation.COPY_AND_METADATA)
    ]
    forward = _write_forward(traced, halves, compile_graph(halves.forward, "forward"), needed)
    backward = _Backward(traced, halves, compile_graph, specialize, needed)
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward.__call__),
    }
    function: Any = type("Compiled", (torch.autograd.Function,), methods)
    return training_call(program, function.apply, cloned)


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
    _keep_primals(source, needed)
    writer.rebuild_values()
    _keep_sizes(source, program)
    plain = [i for i, v in enumerate(program.values) if not v.differentiable]
    tensors_only = "".join(f"v{i}, " for i in plain)
    source.add(f"ctx.mark_non_differentiable(*(v for v in ({tensors_only}) if is_tensor(v)))")
    source.names["is_tensor"] = torch.is_tensor
    source.add("ctx.set_materialize_grads(False)")
    source.add(f"return ({''.join(f'v{i}, ' for i in range(len(program.values)))})")
    return writer.load("forward")


def _keep_primals(source: Any, needed: list[int]) -> None:
    """Primals for higher derivatives, with the version they have now."""
    source.add(f"ctx.primals = {{{', '.join(f'{i}: x{i}' for i in needed)}}} | clones")
    source.names["versions_of"] = _versions
    source.add("ctx.versions = versions_of(ctx.primals)")


def _versions(primals: dict[int, Any]) -> list[int]:
    return [version_of(value) for value in primals.values() if isinstance(value, torch.Tensor)]


def _keep_sizes(source: Any, program: Program) -> None:
    """Sizes of values whose tangents may have to be zeros of a size known only now."""
    if any(plan.stride is None for plan in program.tangents):
        sizes = [f"v{i}.size()" for i, v in enumerate(program.values) if v.differentiable]
        source.add(f"ctx.sizes = ({''.join(size + ', ' for size in sizes)})")


@dataclass(slots=True)
class _Backward:
    """Runs gradients; compiles a graph when a new set of tangents first arrives."""

    traced: Traced
    halves: Split
    compile_graph: CompileGraph
    specialize: Specialize
    needed: list[int]
    graphs: dict[tuple[bool, ...], _Loaded] = field(default_factory=dict)
    higher: dict[tuple[bool, ...], Flat] = field(default_factory=dict)

    def __call__(self, ctx: Any, *given: Any) -> tuple[Any, ...]:
        program = self.traced.program
        tangents = [
            tangent
            for tangent, value in zip(given, program.values, strict=True)
            if value.differentiable
        ]
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
            arguments += tensor_parts(_settled(tangent, plan), plan.layout)
        del tangents, given
        with below_autograd(BELOW_AUTOGRAD):
            grads = loaded.run(arguments)
        return (None, *_by_input(program, grads))

    def _load(self, missing: tuple[bool, ...]) -> _Loaded:
        assert self.halves.backward is not None, "a program with tangents has a backward"
        module = copy.copy(self.halves.backward)
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        placeholders = graph.find_nodes(op="placeholder")[len(self.halves.saved) :]
        groups = _grouped(self.traced.program.tangents, placeholders)
        mark_tangents(graph, placeholders)
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
        run = self.compile_graph(fx.GraphModule(module, graph, "Backward"), "backward")
        self.graphs[missing] = loaded = _Loaded(run, present, like)
        return loaded

    def _differentiable(
        self, ctx: Any, tangents: list[Any], missing: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """Gradients that can be differentiated again, from the primals."""
        if ctx.primals is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed)."
            )
        _check_versions(ctx)
        if missing not in self.higher:
            self.higher[missing] = self.specialize(_GradientProgram(self, missing).run)
        arguments = [ctx.primals[i] for i in self.needed]
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


class _GradientProgram:
    """Primals and tangents to gradients, one for each input, as a program of its own."""

    def __init__(self, backward: _Backward, missing: tuple[bool, ...]) -> None:
        traced = backward.traced
        self.program = traced.program
        self.needed = backward.needed
        self.missing = missing
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        graph.graph_copy(traced.module.graph, copies)
        graph.output(tuple(copies[g] if isinstance(g, fx.Node) else None for g in traced.grads))
        tangents = [copies[node] for node in traced.tangents]
        mark_tangents(graph, tangents)
        _prune(graph, _grouped(self.program.tangents, tangents), missing)
        drop_unread(graph)
        self.module = fx.GraphModule(traced.module, graph, "Gradients")

    def run(self, *arguments: Any) -> list[Any]:
        """Gradients by input; None where there is none."""
        stream = iter(arguments)
        given = {index: next(stream) for index in self.needed}
        plain: list[Any] = []
        for index, fact in enumerate(self.program.inputs):
            if index in given:
                plain += take_apart(given[index], fact.layout)
            else:
                plain += [None] * width(fact.layout)
        for plan, absent in zip(self.program.tangents, self.missing, strict=True):
            if absent:
                plain += [None] * tensor_count(plan.layout)
            else:
                plain += tensor_parts(_settled(next(stream), plan), plan.layout)
        grads = fx.Interpreter(self.module).run(*plain)
        return _by_input(self.program, grads)


def _by_input(program: Program, grads: Sequence[Any]) -> list[Any]:
    stream = iter(grads)
    found: list[Any] = []
    for layout in program.grads:
        if layout is None:
            found.append(None)
            continue
        parts = [next(stream) for _ in range(width(layout))]
        missing = all(part is None for part in parts)
        found.append(None if missing else put_together(layout, iter(parts)))
    return found


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


def _settled(tangent: torch.Tensor, plan: TangentPlan) -> torch.Tensor:
    """The tangent, in the memory layout that the backward was traced with."""
    if plan.stride is not None and tangent.stride() == plan.stride:
        return tangent
    if not isinstance(plan.layout, Plain):
        return tangent
    if plan.stride is None:
        format_ = torch.channels_last if plan.channels_last else torch.contiguous_format
        return tangent.contiguous(memory_format=format_)
    fresh = torch.empty_strided(
        tangent.size(), plan.stride, dtype=tangent.dtype, device=tangent.device
    )
    return fresh.copy_(tangent)


def _check_versions(ctx: Any) -> None:
    now = _versions(ctx.primals)
    if now != ctx.versions:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of the compiled function is at versions {now}; expected "
            f"{ctx.versions} instead."
        )
