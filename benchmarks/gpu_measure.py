"""One row on a device: each contender compiled with empty caches and checked, then all in turn.

Device time is that of calls that wait in the queue (gpu_clock.py).  Host time is in the other: of a
kernel, a call that is waited for; of a model, steps one after the other.  A step of training is
forward and backward; gradients of the step before are dropped first, and there is no optimizer.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from types import FunctionType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.case import Program, Task
from benchmarks.closeness import tensors
from benchmarks.contenders import STATOR_OPTIONS, Watch, compiled, compiling
from benchmarks.gpu_cases import Exact, GpuCase, Kernel
from benchmarks.gpu_clock import Call, Clock, queued_seconds, waited_seconds
from benchmarks.gpu_record import EAGER, GRAPHS, INDUCTOR, STATOR, GpuOutcome, GpuRow
from benchmarks.work import moved_bytes

SEED: Final = 1
ERROR_LENGTH: Final = 300
ROUNDS: Final = 25
LEAST_ROUNDS: Final = 5
WAITED_CALLS: Final = 7  # whose median is one time
KERNEL_SECONDS: Final = 0.004  # that one device time takes about
MODEL_SECONDS: Final = 0.03
MOST_CALLS: Final = 30

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are measured."""

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 3.0  # of rounds, a row
    contenders: tuple[str, ...] = (EAGER, INDUCTOR, STATOR)
    graphs: bool = False  # mode="reduce-overhead" takes part in inference


def names_for(case: GpuCase, settings: Settings) -> list[str]:
    """Who takes part in a row."""
    names = list(settings.contenders)
    if settings.graphs and case.kind == "infer":
        names += [name + GRAPHS for name in settings.contenders if name != EAGER]
    return names


# ---------------------------------------------------------------------------------------------
# Contenders


def own_code(program: Program, name: str) -> Program:
    """The same function under a code object of its own; a module as it is.

    Dynamo keeps its compiled frames by code object and searches them one by one: contenders that
    shared one would pay for each other.
    """
    if not isinstance(program, FunctionType):
        return program
    code = program.__code__.replace(co_name=f"{program.__name__}_{name}")
    defaults, closure = program.__defaults__, program.__closure__
    return FunctionType(code, program.__globals__, code.co_name, defaults, closure)


def compiled_for(name: str, program: Program, watch: Watch) -> Program:
    """`program` as a contender runs it; it compiles at the first call."""
    program = own_code(program, name)
    if not name.endswith(GRAPHS):
        return compiled(name, program, watch)
    result: Program
    if name.startswith(INDUCTOR):
        result = torch.compile(program, mode="reduce-overhead")
        return result
    from stator.backend import compile_fx

    # Not by torch.compile's own argument, which excludes options.
    backend = partial(compile_fx, mode="reduce-overhead", options=STATOR_OPTIONS)
    result = torch.compile(program, backend=watch.around(backend))
    return result


@contextmanager
def empty_caches(name: str, watch: Watch) -> Iterator[None]:
    """While a contender compiles: nothing on the disk is known to it, or to Triton."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}))
        stack.enter_context(compiling(name.removesuffix(GRAPHS), watch))
        yield


def trivial(x: Tensor) -> Tensor:
    """A program that costs a compiler next to nothing."""
    return (x + 1).relu()


def first_use(name: str, clock: Clock) -> float:
    """What a process pays once, whatever it compiles: imports, workers, probes."""
    x = torch.ones(64, device=clock.device, requires_grad=True)
    program = compiled_for(name, trivial, Watch())
    begin = time.perf_counter()
    program(x).sum().backward()
    with torch.no_grad():
        program(x)
    clock.wait()
    return time.perf_counter() - begin


def in_words(error: BaseException) -> str:
    """One line that says what happened."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_LENGTH]


# ---------------------------------------------------------------------------------------------
# Compilation, errors, memory


@dataclass(slots=True)
class Checker:
    """Errors of results against float64; what eager's is, decides what is allowed."""

    case: GpuCase
    task: Task
    exact: Exact | None = None  # None: it depends on what random numbers were drawn
    eager: float = 0.0

    def check(self, name: str, results: Sequence[Any], outcome: GpuOutcome) -> None:
        """Note the error of a contender's results."""
        exact = self.exact or self.case.exact(self.task, results)
        outcome.off = self.case.off(results, exact)
        if name == EAGER:
            self.eager = outcome.off
        outcome.allowed = 2 * self.eager + ulp(tensors(results))


def ulp(results: Sequence[Tensor]) -> float:
    """The spacing of numbers of the coarsest type among the results."""
    kinds = {value.dtype for value in results if value.is_floating_point()}
    return max((float(torch.finfo(kind).eps) for kind in kinds), default=0.0)


def drop_gradients(task: Task) -> None:
    """Gradients of an earlier call go."""
    for leaf in task.leaves:
        leaf.grad = None


def start(name: str, task: Task, clock: Clock, checker: Checker) -> tuple[Program, GpuOutcome]:
    """Compile, check and weigh one contender."""
    outcome = GpuOutcome()
    drop_gradients(task)
    gc.collect()
    held = clock.held()
    watch = Watch()
    program = compiled_for(name, task.program, watch)
    with empty_caches(name, watch):
        first, first_backward, output = _timed_step(task, program, clock)
        checker.check(name, task.results(output), outcome)
        del output
        again, again_backward, _ = _timed_step(task, program, clock)
    if name != EAGER:
        outcome.compile = max(0.0, first - again)
        # A backward is compiled when it is first needed, out of the backend's sight.
        outcome.backend = watch.seconds + max(0.0, first_backward - again_backward)
    drop_gradients(task)
    outcome.peak = clock.peak(partial(task.step, program)) - held
    if outcome.is_wrong:
        outcome.error = f"wrong by {outcome.off:.1e}, {outcome.allowed:.1e} allowed"
    return program, outcome


def _timed_step(task: Task, program: Program, clock: Clock) -> tuple[float, float, Any]:
    """Seconds of a step, of its backward alone, and the output."""
    clock.wait()
    begin = time.perf_counter()
    output = task.forward(program)
    clock.wait()
    between = time.perf_counter()
    task.backward(output)
    clock.wait()
    end = time.perf_counter()
    return end - begin, end - between, output


# ---------------------------------------------------------------------------------------------
# Times


@dataclass(slots=True)
class Timed:
    """A contender that is called in turn with the others."""

    outcome: GpuOutcome
    calls: list[Call]  # one for each set of inputs
    is_model: bool
    count: int = 1
    queue: list[Call] = field(default_factory=list)

    def settle(self, clock: Clock) -> None:
        """See how many calls make a time."""
        seconds = queued_seconds(clock, self.calls)
        wanted = MODEL_SECONDS if self.is_model else KERNEL_SECONDS
        least = 1 if self.is_model else len(self.calls)
        self.count = max(least, min(MOST_CALLS, round(wanted / seconds)))
        self.queue = list(islice(cycle(self.calls), max(self.count, WAITED_CALLS)))

    def round(self, clock: Clock) -> None:
        """One time of each kind."""
        self.outcome.device.append(clock.device_seconds(self.queue[: self.count]))
        if self.is_model:
            whole = queued_seconds(clock, self.queue[: self.count])
        else:
            whole = waited_seconds(clock, self.queue[:WAITED_CALLS])
        self.outcome.whole.append(whole)


def interleave(timed: Sequence[Timed], clock: Clock, seconds: float) -> None:
    """Call all in turn, round after round; who begins changes."""
    for _ in range(2):
        for one in timed:
            one.settle(clock)
    order = list(timed)
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    try:
        for number in range(ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() > begin + seconds:
                break
            for one in order:
                one.round(clock)
            order = order[1:] + order[:1]
    finally:
        gc.enable()


def graphs_captured() -> int:
    """How many graphs Dynamo has captured in this process."""
    return int(counters["stats"]["unique_graphs"])


def _marked(call: Call) -> Call:
    """The call after word that outputs of the one before are no longer read."""

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return marked


def _calls_of(name: str, tasks: Sequence[Task], program: Program) -> list[Call]:
    calls: list[Call] = [partial(task.step, program) for task in tasks]
    return [_marked(call) for call in calls] if name.endswith(GRAPHS) else calls


def measure(case: GpuCase, clock: Clock, settings: Settings, announce: Announce) -> GpuRow:
    """The whole row; a contender that fails says why, and the others go on."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    announce("builds its inputs")
    tasks = case.tasks(clock.device, settings.tiny)
    task = tasks[0]
    row = GpuRow(case.name, case.kind, case.size, case.memory_bound)
    output = task.step(task.program)  # libraries take their workspaces here
    row.moved = moved_bytes(task, output)
    if isinstance(case, Kernel):
        row.flops = case.flops(case.tiny if settings.tiny else case.full)
    checker = Checker(case, task)
    if case.nearest is None:  # before anyone's memory is looked at
        checker.exact = case.exact(task, task.results(output))
    del output
    timed = []
    for name in names_for(case, settings):
        announce(f"{name} compiles")
        try:
            program, outcome = start(name, task, clock, checker)
            clock.wait()
        except Exception as error:
            if name == EAGER:
                raise
            traceback.print_exc()
            outcome = GpuOutcome(error=in_words(error))
        else:
            # What is wrong is timed all the same: the row says both.
            timed.append(Timed(outcome, _calls_of(name, tasks, program), case.kind != "kernel"))
        row.outcomes[name] = outcome
    checker.exact = None
    announce("calls are timed")
    graphs = graphs_captured()
    interleave(timed, clock, settings.seconds)
    row.recompiled = graphs_captured() > graphs
    drop_gradients(task)
    return row
