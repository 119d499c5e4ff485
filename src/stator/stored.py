"""A program that was compiled before: found by its captured graph, put together again.

A hit loads machine code and nothing else.  What it does not hold (derivatives of higher order, a
backward for other tangents, inputs that share memory) is compiled when it is asked for, from the
captured graph: the compiler is imported then, not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stator.aot.assemble import assemble, with_alias_check
from stator.aot.function import BackwardGraphs
from stator.aot.metadata import Facts
from stator.cache.fingerprint import NoKey, fingerprint, user_lines
from stator.cache.opening import open_store
from stator.cache.programs import FoundBackward, Programs, StoredProgram
from stator.core import faults
from stator.core.events import Compilation
from stator.core.torch_types import Flat
from stator.errors import CompileError
from stator.options import Options
from stator.runtime.native.image import why_not_native
from stator.runtime.native.prelude import hold_no_spare
from stator.torch_api import (
    FakeTensorMode,
    autocast_state,
    compile_state,
    fake_inputs,
    guard_count,
    has_static_sizes,
    is_held,
    is_weight,
    storage_of,
)


def weight_positions(inputs: Sequence[Any], options: Options) -> frozenset[int]:
    """Inputs that stay the same from call to call, as far as the options make use of that."""
    wanted = options.freezing or options.pack_weights
    if not wanted or _why_no_constants(options) is not None:
        return frozenset()
    return frozenset(number for number, value in enumerate(inputs) if is_weight(value))


def not_frozen(inputs: Sequence[Any], weights: Collection[int], options: Options) -> list[str]:
    """What is to be said of the inputs of a program that is to be frozen: weights that are none."""
    if not options.freezing:
        return []
    if (reason := _why_no_constants(options)) is not None:
        return [f"nothing is frozen: {reason}"]
    others = [one for number, one in enumerate(inputs) if number not in weights and is_held(one)]
    if others:
        why = "made in inference mode, or no plain tensors on a CPU or a GPU of Nvidia's"
        return [f"not frozen: {len(others)} weights: they are {why}"]
    return [] if weights else ["nothing is frozen: it reads no parameter or buffer of a module"]


def _why_no_constants(options: Options) -> str | None:
    if not options.kernels:
        return "Options.kernels is off"
    return None if options.executor == "native" else f"Options.executor is {options.executor!r}"


def find_programs(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    record: Compilation,
    weights: frozenset[int] = frozenset(),
) -> Programs | None:
    """Where the graph's programs are kept; None if they are not, and the record says why."""
    reason = "a fault is set" if faults.SET else why_not_cached(options)
    if reason is not None:
        record.cache = f"off: {reason}"
        return None
    with record.stage("key", len(module.graph.nodes)):
        lines = user_lines(module)
        try:
            key = fingerprint(module, inputs, options, lines, weights)
        except (NoKey, OSError) as error:  # OSError: our own files cannot be read now
            record.cache = f"off: {error}"
            return None
    try:
        store = open_store(options)
    except RuntimeError as error:  # the user has no home
        record.cache = f"off: {error}"
        return None
    return Programs(store, key, list(dict.fromkeys(lines.values())), record)


def why_not_cached(options: Options) -> str | None:
    """None if programs are kept under these options; otherwise the reason, for the log."""
    if not options.cache:
        return "Options.cache"
    if options.verify_passes == "values":
        return "Options.verify_passes wants to see every pass"
    if options.dump_dir is not None:
        return "Options.dump_dir wants to see every stage"
    if options.explain_memory:
        return "Options.explain_memory wants to see every choice"
    if options.profile_ranges:
        return "Options.profile_ranges names lines of this program"
    if options.save_policy is not None:
        return "Options.save_policy is a function, which may answer otherwise next time"
    if options.executor != "native" or not options.kernels or options.codegen == "triton":
        return "only native programs are kept"
    return why_not_native()


def why_not_kept(mode: FakeTensorMode, promises: int) -> str | None:
    """None unless a trace made more conditions on sizes than the `promises` that Dynamo knows."""
    changed = guard_count(mode) != promises
    return "its sizes were found to obey conditions" if changed else None


@dataclass(slots=True)
class Captured:
    """A captured graph, and what compiling it takes: done when something asks for it."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    lifted: dict[str, torch.Tensor]
    options: Options
    record: Compilation
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    autocast: tuple[Any, ...] = field(default_factory=autocast_state)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    runner: Flat | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph, as the compiler traces it."""
        from stator.pipeline import make_tools, prepare

        if self.runner is None:
            tools = make_tools(self.options, self.record)
            self.runner = prepare(self.module, list(self.lifted), tools)
        return self.runner(*arguments)

    def specialize(self, function: Flat, *, replays_random: bool = False) -> Flat:
        """A program, compiled for each new kind of arguments."""
        return _Late(self, function, replays_random)

    def compile_backward(
        self, facts: Facts, fakes: list[Any], mode: FakeTensorMode, programs: Programs
    ) -> BackwardGraphs:
        """Trace the program again, for a backward graph that nobody kept; from now on it is."""
        from stator.aot.compile import trace_and_cut
        from stator.aot.graphs import FreshBackward, facts_of
        from stator.pipeline import make_tools

        tools = make_tools(self.options, self.record, recordings=programs.recordings)
        promises = guard_count(mode)
        with self._as_it_was():
            same_state = compile_state() == dict(programs.key.parts)["state"]
            traced, halves = trace_and_cut(self, fakes, mode, tools)
        if facts_of(traced, halves) != facts:
            raise CompileError("trace", "a program was traced to another one than is in the cache")

        def may_keep() -> str | None:
            return why_not_kept(mode, promises) if same_state else "torch's switches were turned"

        return FreshBackward(traced, halves, tools, programs.keeper(may_keep))

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The state of torch's in which the graph was captured, as far as it decides a trace."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            for device, _ in autocast_state():  # that of whoever asks for gradients
                stack.enter_context(torch.autocast(device, enabled=False))
            for device, kind in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=kind))
            if dtype != self.dtype:
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self.dtype)
            yield


@dataclass(slots=True)
class _Late:
    """A specialized program whose compiler comes with the first call."""

    captured: Captured
    function: Flat
    replays_random: bool
    compiled: Flat | None = None

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if self.compiled is None:
            from stator.pipeline import make_tools

            tools = make_tools(self.captured.options, self.captured.record)
            self.compiled = tools.specialize(self.function, replays_random=self.replays_random)
        return self.compiled(*arguments)


def restored(programs: Programs, stored: StoredProgram, captured: Captured) -> Flat:
    """The program as a function, without compiling anything."""
    if captured.options.saves_memory:
        hold_no_spare()
    facts = stored.facts
    inputs: list[Any] = [*captured.inputs, *captured.lifted.values()]
    # Another backward may have to be traced, when inputs are gone.
    twins = fakes_later(captured) if facts.program.is_training else None
    captured.inputs = ()  # nobody else's memory is kept

    def compile_backward() -> BackwardGraphs:
        assert twins is not None, "a program without tangents has no backward"
        return captured.compile_backward(facts, *twins(), programs)

    backward = FoundBackward(programs, compile_backward)
    call = assemble(captured, facts, stored.forward, backward, captured)
    return with_alias_check(captured, call, facts.program, inputs, captured)


def fakes_later(captured: Captured) -> Callable[[], tuple[list[Any], FakeTensorMode]]:
    """Fake twins of a graph's inputs for whoever asks when those are gone.

    Parameters are many, and half a millisecond each: only their descriptions are taken now.
    """
    storages = Counter(storage_of(value) for value in captured.inputs)

    def is_plain(value: Any) -> bool:
        return (
            type(value) is torch.nn.Parameter
            and value.layout is torch.strided
            and storages[storage_of(value)] == 1
            and has_static_sizes(value)
        )

    parameters = {
        index: (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        for index, value in enumerate(captured.inputs)
        if is_plain(value)
    }
    fakes, mode = fake_inputs(
        [None if index in parameters else value for index, value in enumerate(captured.inputs)]
    )
    lifted = captured.lifted.values()
    constants = [mode.from_tensor(tensor, static_shapes=True) for tensor in lifted]

    def twins() -> tuple[list[Any], FakeTensorMode]:
        with mode:
            for index, (shape, stride, dtype, device, requires_grad) in parameters.items():
                data = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                fakes[index] = torch.nn.Parameter(data, requires_grad)
        return [*fakes, *constants], mode

    return twins
