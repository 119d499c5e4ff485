"""The torch.compile door: `torch.compile(model, backend="stator")`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from stator.cache.programs import Programs
from stator.core.events import Compilation, Details, start_compilation
from stator.core.fallback import explained, note_fallback
from stator.core.logs import logger, turn_on
from stator.core.progress import progress_shown
from stator.core.torch_types import Flat
from stator.core.undisturbed import undisturbed
from stator.errors import OptionError
from stator.graph.capture import annotated_budget, attribute_tensors, nodes_inside
from stator.options import Options, read_options, refuse_contradictions
from stator.stored import (
    Captured,
    find_programs,
    not_frozen,
    restored,
    weight_positions,
    why_not_kept,
)
from stator.torch_api import NEEDS_VALUES, TracingContext, fake_inputs, guard_count, is_weight

log: Final = logger("cache")

# A tool that is given each graph in the compiler's place, and returns what is to run.
Watcher = Callable[[fx.GraphModule, Sequence[Any], Options], Callable[..., Any]]
_watchers: list[Watcher] = []

TORCH_COMPILE_KEYWORDS = ("dynamic", "fullgraph", "disable")


def compile(
    function: Callable[..., Any] | torch.nn.Module | None = None,
    *,
    mode: str | None = None,
    **options: Any,
) -> Any:
    """Compile a function or module; also a decorator.  Keywords are Options fields, or
    `dynamic`, `fullgraph` and `disable` of torch.compile."""
    passed = {name: options.pop(name) for name in TORCH_COMPILE_KEYWORDS if name in options}
    checked = read_options(mode, options)
    if checked.discard_parameters and not checked.freezing:
        raise OptionError("discard_parameters without freezing", hint="give freezing=True as well")

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(module, inputs, options=checked)

    if checked.discard_parameters:  # what is left of weights no longer fits Dynamo's guards
        passed["options"] = {"guard_filter_fn": not_on_weights}
    return torch.compile(function, backend=backend, **passed)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Let a tool have the graphs that are captured meanwhile; what it compiles, is compiled."""

    def alone(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Any:
        with _unwatched():
            run = by(module, inputs, options)

        def call(*arguments: Any) -> Any:
            with _unwatched():
                return run(*arguments)

        return call

    _watchers.append(alone)
    try:
        yield
    finally:
        _watchers.remove(alone)


@contextmanager
def _unwatched() -> Iterator[None]:
    kept = _watchers[:]
    _watchers.clear()
    try:
        yield
    finally:
        _watchers[:] = kept


def not_on_weights(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to keep: those that do not look at a weight."""
    return [not is_weight(guard.value) for guard in guards]


def compile_fx(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured; returns a function with the graph's signature.

    A failure inside of the compiler makes the graph run in eager mode, with one warning; under
    `Options.strict` it raises.  Where the program looks at values, Dynamo breaks the graph.
    """
    chosen = read_options(mode, options)
    if chosen.discard_parameters and not isinstance(options, Options):
        raise OptionError(
            "discard_parameters cannot be an option of torch.compile, whose guards read weights",
            hint="use stator.compile(model, freezing=True, discard_parameters=True)",
        )
    budget = annotated_budget(nodes_inside(module))
    if budget is not None and chosen.kernels:
        chosen = replace(chosen, memory_budget=budget)
        refuse_contradictions(chosen)
    if _watchers:
        return _watchers[-1](module, example_inputs, chosen)
    turn_on(chosen.logs)
    record = start_compilation()
    record.details = Details() if chosen.explain else None
    eager: Callable[..., Any] = module.forward
    try:
        return _compile(module, example_inputs, chosen, record)
    except NEEDS_VALUES as error:
        record.fallback = str(explained(error, record))
        if TracingContext.try_get() is not None:
            raise  # Dynamo breaks the graph there, says so, and compiles the parts
        note_fallback(error, record, chosen.strict)
        return eager
    except Exception as error:
        note_fallback(error, record, chosen.strict)
        return eager


@undisturbed
def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, record: Compilation
) -> Callable[..., Any]:
    lifted = attribute_tensors(module)
    weights = weight_positions([*inputs, *lifted.values()], options)
    programs = find_programs(module, inputs, options, record, weights)
    stored = programs.find() if programs is not None else None
    log.debug("compilation %d: %s", record.number, record.cache)
    if options.explain:  # whatever the cache holds: a program from there has no stages to show
        programs = stored = None
    if programs is not None and stored is not None:
        with record.stage("load"):
            call = restored(programs, stored, Captured(module, inputs, lifted, options, record))
    else:
        captured = Captured(module, inputs, lifted, options, record)
        call = _compile_anew(captured, weights, programs)
    (output,) = module.graph.find_nodes(op="output")
    single = not isinstance(output.args[0], tuple | list)
    if not lifted and not single:
        return call
    constants = tuple(lifted.values())

    def as_captured(*arguments: Any) -> Any:
        outputs = call(*arguments, *constants)
        return outputs[0] if single else outputs

    return as_captured


def _compile_anew(captured: Captured, weights: frozenset[int], programs: Programs | None) -> Flat:
    # Imported when something is compiled: what was compiled before runs without the compiler.
    from stator.aot.compile import compile_flat
    from stator.pipeline import expected_stages, make_tools, prepare

    fakes, mode = fake_inputs(captured.inputs)
    lifted = captured.lifted
    fakes += [mode.from_tensor(tensor, static_shapes=True) for tensor in lifted.values()]
    examples = [*captured.inputs, *lifted.values()]
    captured.record.notes.extend(not_frozen(examples, weights, captured.options))
    held = {number: examples[number] for number in weights}
    tools = make_tools(captured.options, captured.record, examples, held)
    promises = guard_count(mode)
    keeper = None if programs is None else programs.keeper(lambda: why_not_kept(mode, promises))
    stages = expected_stages(captured.options)
    with progress_shown(captured.record, stages, wanted=captured.options.progress):
        program = prepare(captured.module, list(lifted), tools)
        return compile_flat(program, fakes, mode, tools, keeper)
