"""The Python executor: a plan as one readable Python function."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import fx

from stator.core.source import Source
from stator.core.torch_types import Boxed
from stator.loops.index import Index
from stator.runtime.plan import (
    ALIGNED,
    Allocation,
    Call,
    Constant,
    Free,
    Launch,
    Number,
    Plan,
    Require,
    Step,
    Together,
    View,
)
from stator.runtime.rare import as_planned, refuse, require_later, truth
from stator.runtime.verified import Watch
from stator.torch_api import entry_of, out_variant

WORTH_THREADS: Final = 1 << 16  # points times operations; below, forking costs more than it gains


def load_plan(
    plan: Plan,
    label: str,
    watch: Watch | None = None,
    ranges: Mapping[int, str] | None = None,
) -> Boxed:
    """A function that runs `plan`; `watch` is told of every step, before and after.

    Steps in `ranges` have names that torch's profiler sees.
    """
    source = Source()
    source.add("def run(args):", 0)
    if plan.inputs:
        source.add(f"{', '.join(plan.inputs)}, = args")
        source.add("args.clear()")
    with _current(source, plan):
        _steps(source, plan, watch, ranges or {})
        source.add(f"return {_value(source, tuple(plan.outputs))}")
    run: Boxed = source.load(label)["run"]
    return run


def _current(source: Source, plan: Plan) -> AbstractContextManager[None]:
    """Where the plan's device is the current one, as calls and launches expect it."""
    if not plan.on_gpu:
        return nullcontext()
    opened = source.bind(torch.cuda.device, "device")
    return source.block(f"with {opened}({plan.device.index or 0}):")


def _steps(source: Source, plan: Plan, watch: Watch | None, ranges: Mapping[int, str]) -> None:
    for symbol, shown in plan.sizes.items():
        source.add(f"{symbol} = {shown}")
    settled: set[str] = set()  # tensors whose strides were looked at
    watcher = None if watch is None else source.bind(watch, "watch")
    if watcher is not None:
        source.add(f"{watcher}.begin({_named(plan.inputs)})")
    for number, step in enumerate(plan.steps):
        if watcher is None or isinstance(step, Free):
            with _range(source, ranges.get(number)):
                _step(source, plan, step, settled)
            continue
        bound = source.bind(step, "step")
        source.add(f"{watcher}.before({bound}, {_named(step.takes)})")
        _step(source, plan, step, settled)
        source.add(f"{watcher}.after({bound}, {_named((*step.makes, *step.takes))})")
    if watcher is not None:
        source.add(f"{watcher}.end()")


def _named(names: Iterable[str]) -> str:
    """A dict of the values that go by these names."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in dict.fromkeys(names)) + "}"


def _range(source: Source, label: str | None) -> AbstractContextManager[None]:
    if label is None:
        return nullcontext()
    opened = source.bind(torch.profiler.record_function, "range")
    return source.block(f"with {opened}({source.literal(label)}):")


def _step(source: Source, plan: Plan, step: Step, settled: set[str]) -> None:
    match step:
        case Launch():
            _launch(source, plan, step, settled)
        case Together():
            _launch_together(source, plan, step, settled)
        case Call():
            if step.out is not None:
                _allocate(source, plan, step.out)
            source.add(f"{step.name} = {_call(source, step)}")
        case View():
            source.add(f"{step.made.name} = {_view(source, step)}")
        case Constant():
            source.add(f"{step.name} = {source.bind(step.value, 'constant')}")
        case Number():
            source.add(f"{step.name} = {step.index}")
        case Require():
            _require(source, plan, step)
        case Free():
            source.add(f"del {', '.join(step.names)}")


def _require(source: Source, plan: Plan, step: Require) -> None:
    message = source.literal(step.message)
    if plan.on_gpu:
        source.add(f"{source.bind(require_later, 'require')}({step.flag}, {message})")
        return
    source.add(f"if {source.bind(truth, 'truth')}({step.flag}):")
    source.add(f"raise {source.bind(step.error, 'error')}({message})", 2)


def _launch(source: Source, plan: Plan, step: Launch, settled: set[str]) -> None:
    """Make the outputs, then run the kernel on addresses."""
    _prepare(source, plan, step, settled)
    given = [*_given(step), _threads_of(source, plan, step)]
    source.add(f"{source.bind(plan.entries[step.nameless].function, 'kernel')}({', '.join(given)})")


def _launch_together(source: Source, plan: Plan, step: Together, settled: set[str]) -> None:
    """The same over a list: a table of addresses and sizes, one line for each."""
    for launch in step.launches:
        _prepare(source, plan, launch, settled)
    cells = [cell for launch in step.launches for cell in _given(launch)]
    table = source.bind(ctypes.c_int64 * len(cells), "table")
    entry = source.bind(plan.entries[step.nameless].function, "kernel")
    given = f"{len(step.launches)}, {_threads_of(source, plan, step)}"
    source.add(f"{entry}({table}({', '.join(cells)}), {given})")


def _prepare(source: Source, plan: Plan, step: Launch, settled: set[str]) -> None:
    """Tensors as the kernel expects them, and those that it makes."""
    for name in step.takes:
        if name in plan.layouts and name not in settled:
            settled.add(name)
            stride, dtype = _tuple(plan.layouts[name][0]), source.literal(plan.layouts[name][1])
            is_callers = name in step.writes and name in plan.callers
            fix = source.bind(refuse if is_callers else as_planned, "as_planned")
            other = f"{name}.stride() != {stride} or {name}.dtype is not {dtype}"
            if plan.on_gpu and name not in plan.loose:
                other += f" or {name}.data_ptr() % {ALIGNED}"
            source.add(f"if {other}:")
            source.add(f"{name} = {fix}({name}, {stride}, {dtype})", 2)
    for made in step.allocations:
        _allocate(source, plan, made)
    settled.update(step.makes)


def _allocate(source: Source, plan: Plan, made: Allocation) -> None:
    empty = source.bind(torch.empty_strided, "empty")
    given = f"{_tuple(made.size)}, {_tuple(made.stride)}, dtype={source.bind(made.dtype, 'dtype')}"
    if plan.on_gpu:
        given += f", device={source.bind(plan.device, 'device')}"
    source.add(f"{made.name} = {empty}({given})")


def _given(step: Launch) -> list[str]:
    return [*(f"{name}.data_ptr()" for name in step.arguments), *(str(n) for n in step.sizes)]


def _threads_of(source: Source, plan: Plan, step: Launch | Together) -> str:
    if plan.on_gpu:
        return "1"  # which only starts it
    return _threads(step.work, f"{source.bind(torch.get_num_threads, 'threads')}()")


def _threads(work: Index, all_of_them: str) -> str:
    """How many threads a kernel runs on: below the break-even one, without asking."""
    if work.constant is not None:
        return all_of_them if work.constant >= WORTH_THREADS else "1"
    return f"{all_of_them} if {work} >= {WORTH_THREADS} else 1"


def _tuple(sizes: tuple[Index, ...]) -> str:
    return f"({''.join(f'{size}, ' for size in sizes)})"


def _view(source: Source, view: View) -> str:
    if view.call is not None:
        return _call(source, view.call)
    return f"{view.source}.as_strided({_tuple(view.made.size)}, {_tuple(view.made.stride)})"


def _call(source: Source, call: Call) -> str:
    if call.target is operator.getitem:
        return f"{_value(source, call.args[0])}[{_value(source, call.args[1])}]"
    given = [_value(source, arg) for arg in call.args]
    given += [f"{name}={_value(source, value)}" for name, value in call.kwargs.items()]
    hint = str(getattr(call.target, "__name__", "call")).replace(".", "_").replace("<lambda>", "f")
    entry = entry_of(call.target)
    if call.out is not None:
        given.append(f"out={call.name}")
        entry = entry_of(out_variant(call.target))
    return f"{source.bind(entry, hint)}({', '.join(given)})"


def _value(source: Source, value: Any) -> str:
    """An expression for an argument: names for nodes, literals for the rest."""
    if isinstance(value, fx.Node):
        return str(value.name)
    if isinstance(value, list):
        return "[" + ", ".join(_value(source, item) for item in value) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_value(source, item) + ", " for item in value) + ")"
    if isinstance(value, dict):
        items = (f"{source.literal(key)}: {_value(source, item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        parts = (_value(source, part) for part in (value.start, value.stop, value.step))
        return f"slice({', '.join(parts)})"
    return source.literal(value)
