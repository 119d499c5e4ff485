"""Compile a flat program: trace, cut, wrap.  And again, when arguments of another kind come."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG
from typing import Any, Final

import torch

from stator.aot.aliasing import Merged, overlapping_groups, writes_to_shared
from stator.aot.assemble import assemble, with_alias_check
from stator.aot.graphs import CompileGraph, FreshBackward, Keeper, facts_of
from stator.aot.metadata import Mutation, Program
from stator.aot.partition.split import Choose, Split, split
from stator.aot.partition.weigh import bytes_of
from stator.aot.subclasses import PLAIN, width
from stator.aot.trace import Traced, trace
from stator.core.events import Compilation, SavedNote
from stator.core.fallback import note_fallback
from stator.core.logs import logger
from stator.core.torch_types import Flat
from stator.core.undisturbed import undisturbed
from stator.errors import OptionError, Unsupported
from stator.graph.capture import GraphRunner
from stator.graph.edit import VALUE, WEIGHT, drop_unread
from stator.graph.run import Ctx, GraphPass, dump_graph, run_passes
from stator.graph.text import shape_text
from stator.graph.verify import user_line, verify
from stator.torch_api import FakeTensorMode, autocast_state, is_traceable_wrapper_subclass

log: Final = logger("partition")


@dataclass(frozen=True, slots=True)
class Tools:
    """What compiling a program takes beside the program."""

    ctx: Ctx
    compile_graph: CompileGraph
    choose: Choose  # what the backward keeps of the forward
    joint_passes: tuple[GraphPass, ...] = ()  # over forward and backward together
    # Inputs that stay the same from call to call, by position; None: nobody looks into them.
    weights: Mapping[int, weakref.ref[torch.Tensor] | None] = field(default_factory=dict)

    def specialize(self, function: Flat, *, replays_random: bool = False) -> Specialized:
        """`function`, compiled for each new kind of arguments."""
        return Specialized(function, self, replays_random)

    def on_failure(self, error: Exception) -> None:
        """Say that something runs uncompiled; under `Options.strict`, raise."""
        note_fallback(error, self.ctx.record, self.ctx.options.strict)


def compile_flat(
    function: Flat,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    tools: Tools,
    keeper: Keeper | None = None,
) -> Flat:
    """Compile `function`, a captured graph, for fake `inputs`; `keeper` gets what can be kept."""
    again = isinstance(function, GraphRunner) and function.may_run_again()
    if isinstance(function, GraphRunner) and not again:
        _note_full_trace(tools.ctx.record, "it holds an operator that takes functions")
    call, program = _compile(function, inputs, mode, tools, keeper, may_run_again=again)
    return with_alias_check(function, call, program, inputs, tools)


@undisturbed
def _compile(
    function: Flat,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    tools: Tools,
    keeper: Keeper | None = None,
    *,
    may_run_again: bool = False,
) -> tuple[Flat, Program]:
    traced, halves = trace_and_cut(function, inputs, mode, tools, may_run_again=may_run_again)
    facts = facts_of(traced, halves)
    forward = tools.compile_graph(halves.forward, "forward")
    if keeper is not None:
        keeper.keep_forward(facts, forward.image)
    backward = FreshBackward(traced, halves, tools, keeper)
    return assemble(function, facts, forward.run, backward, tools), facts.program


def _note_full_trace(record: Compilation, reason: str) -> None:
    record.notes.append(f"traced in full, which takes longer: {reason}")


def trace_and_cut(
    function: Flat,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    tools: Tools,
    *,
    may_run_again: bool = False,
) -> tuple[Traced, Split]:
    """The program as a forward and a backward graph; a captured graph may be run again."""
    record, as_eager = tools.ctx.record, tools.ctx.options.has_eager_bits
    with record.stage("trace") as progress:
        traced = trace(function, inputs, mode, as_eager=as_eager, may_run_again=may_run_again)
        progress.nodes = len(traced.module.graph.nodes)
    if traced.why_full is not None:
        _note_full_trace(record, traced.why_full)
    drop_unread(traced.module.graph)  # patterns count readers
    _mark_weights(traced, tools)
    name = "joint" if traced.tangents else "traced"
    run_passes(tools.joint_passes, traced.module.graph, tools.ctx, name)
    dump_graph(traced.module.graph, tools.ctx, name)
    with record.stage("partition", progress.nodes) as progress:
        halves = split(traced, tools.choose)
        record.inputs, record.outputs = halves.inputs, halves.outputs
        progress.nodes = len(halves.forward.graph.nodes)
        if halves.backward is not None:
            progress.nodes += len(halves.backward.graph.nodes)
    _note_saved(halves, record)
    if tools.ctx.options.verify:
        verify(halves.forward.graph, after="partition")
        if halves.backward is not None:
            verify(halves.backward.graph, after="partition")
    return traced, halves


def _note_saved(halves: Split, record: Compilation) -> None:
    """Tell the log, and an explanation that is asked for, what the backward keeps."""
    if halves.backward is None or (record.details is None and not log.isEnabledFor(DEBUG)):
        return
    inputs = halves.backward.graph.find_nodes(op="placeholder")[: len(halves.saved)]
    found = [
        SavedNote(
            node.name,
            saved.kept.name.lower(),
            shape_text(node.meta.get("val")),
            bytes_of(node.meta.get("val")),
            user_line(node),
        )
        for node, saved in zip(inputs, halves.saved, strict=True)
    ]
    for one in found:
        log.debug("saved: %s, %s, %d bytes (%s)", one.name, one.shape, one.bytes, one.kind)
    if record.details is not None:
        record.details.saved += found


def _mark_weights(traced: Traced, tools: Tools) -> None:
    """Note on a graph without a backward which inputs stay the same from call to call."""
    told = tools.ctx.record.notes if tools.ctx.options.freezing and tools.weights else []
    if traced.tangents:
        told.append("nothing is frozen: gradients are wanted, which torch.no_grad() turns off")
        return
    stream = iter(traced.primals)
    for index, fact in enumerate(traced.program.inputs):
        nodes = [next(stream) for _ in range(width(fact.layout))]
        if index not in tools.weights:
            continue
        if fact.layout == PLAIN and fact.mutation is Mutation.NONE:
            nodes[0].meta |= {WEIGHT: True, VALUE: tools.weights[index]}
        else:
            told.append(f"{nodes[0].name} is not frozen: the program writes to it")


@dataclass(slots=True)
class Specialized:
    """A program compiled anew for each kind of arguments: shapes, types, grad, shared memory."""

    function: Flat
    tools: Tools
    replays_random: bool = False  # it draws again what a compiled program has drawn
    compiled: dict[Any, Flat] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        key = (_state(), *(_kind(argument) for argument in arguments), _shared(arguments))
        call = self.compiled.get(key)
        if call is None:
            try:
                call = self.compiled[key] = self._compile(arguments)
            except Exception as error:
                return self._fall_back(error, key, arguments)
        return call(*arguments)

    def _fall_back(self, error: Exception, key: Any, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run in eager mode from now on; what the program itself raises is raised as it is."""
        ctx = self.tools.ctx
        if ctx.options.strict or isinstance(error, OptionError):
            note_fallback(error, ctx.record, strict=True)
        if self.replays_random and not ctx.options.draws_as_eager:
            raise Unsupported(
                ctx.record.running,
                f"{type(error).__name__}: {error}",
                hint="eager would draw other random numbers than the kernels did; "
                "Options.fallback_random draws eager's from the start",
            ) from error
        outputs = self.function(*arguments)
        note_fallback(error, ctx.record, strict=False)
        self.compiled[key] = self.function
        return outputs

    def _compile(self, arguments: Sequence[Any]) -> Flat:
        function: Flat = self.function
        groups = overlapping_groups(arguments)
        fakes, mode = to_fake(arguments)
        call, program = _compile(function, fakes, mode, self.tools)
        if not writes_to_shared(program, groups):
            return call
        merged = Merged.of(function, arguments, groups)
        fakes, mode = to_fake(merged.pack(arguments))
        tools = replace(self.tools, weights=merged.packed_places(self.tools.weights))
        call, _ = _compile(merged, fakes, mode, tools)

        def with_bases(*arguments: Any) -> Sequence[Any]:
            return merged.unpack(call(*merged.pack(arguments)), arguments)

        return with_bases


def to_fake(values: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    """Fake twins of real tensors, all sizes static."""
    mode = FakeTensorMode()
    fakes = [
        mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
        for value in values
    ]
    return fakes, mode


def _state() -> tuple[Any, ...]:
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state())


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return (type(value), value)  # 1, 1.0 and True are equal, and give other results
    subclass = is_traceable_wrapper_subclass(value)
    inside = repr(value.__tensor_flatten__()) if subclass else ()
    return (
        type(value),
        value.size(),
        value.stride() if value.layout is torch.strided else (),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        inside,
    )


def _shared(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        tuple((i, arguments[i].storage_offset()) for i in group)
        for group in overlapping_groups(arguments)
    )
