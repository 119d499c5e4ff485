"""One row, in a process of its own: `python -m benchmarks.row KIND NAME FILE`, run by run.py.

So compilers' caches, memory and the allocator's mood do not pass from row to row.  Contenders are
called in turn, each of them once in a round; who begins changes from round to round.
"""

from __future__ import annotations

import datetime
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.case import Case, Program, Task
from benchmarks.cases import find
from benchmarks.contenders import Watch, compiled, compiling, contenders
from benchmarks.machine import (
    KEEPS_PAGES,
    THREADS,
    foreign_share,
    page_faults,
    read_cpu,
    reuses_pages,
)
from benchmarks.record import EAGER, Outcome, Row, store
from benchmarks.results import conditions
from benchmarks.work import copy_call, count_flops, moved_bytes, product_call

SEED: Final = 1
LEAST_ROUNDS: Final = 5
SETTLING_ROUNDS: Final = 3  # until the allocator has what it needs
# One time is the mean of as many calls as make this long, so that no clock or tick is coarse.
LEAST_SECONDS: Final = 0.01
MOST_REPEATS: Final = 50
ERROR_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Budget:
    """Rounds, unless the seconds are over before."""

    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """A contender that compiled, with what it may be called for."""

    task: Task
    program: Program
    outcome: Outcome


def seconds_of(call: Callable[[], Any]) -> float:
    """Time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def trivial(x: Tensor) -> Tensor:
    """A program that costs a compiler next to nothing."""
    return x + 1


def first_use(name: str) -> float | None:
    """What a process pays once, whatever it compiles; nothing for eager."""
    if name == EAGER:
        torch.compile(trivial, backend="eager")(torch.ones(8))  # Dynamo is nobody's own cost
        return None
    x = torch.ones(8, requires_grad=True)
    # Not in `compiling`: compiler probes are kept on disk, for the processes of other rows.
    program = compiled(name, trivial, Watch())

    def both_ways() -> None:
        program(x).sum().backward()
        with torch.no_grad():
            program(x)

    return seconds_of(both_ways)


def start(name: str, task: Task, expected: list[Any] | None) -> tuple[Started, list[Any]]:
    """Compile: the first two calls, timed in their parts; checked against what eager computed."""
    before = first_use(name)
    watch = Watch()
    program = compiled(name, task.program, watch)
    with compiling(name, watch):
        begin = time.perf_counter()
        output = task.forward(program)
        first_backward = seconds_of(lambda: task.backward(output))
        whole = time.perf_counter() - begin
        results = task.results(output)
        error = None if expected is None else task.error(expected, results)
        output = task.forward(program)
        again = seconds_of(lambda: task.backward(output))
    # A backward graph is compiled when it is first needed, out of the backend's sight.
    backend = watch.seconds + (max(0.0, first_backward - again) if watch.graphs else 0.0)
    outcome = Outcome(
        first_use=before,
        first_call=whole,
        backend=backend,
        graphs=watch.graphs,
        relative_error=error,
    )
    if error is not None and not error <= task.tolerance:
        outcome = replace(outcome, error=f"wrong by {error:.1e} of eager's result")
    return Started(task, program, outcome), results


def start_all(case: Case, build: Callable[[], Task], peer: bool) -> dict[str, Started]:
    """Every contender, compiled and checked; one that failed says why."""

    def built() -> Task:
        torch.manual_seed(SEED)
        return build()

    started: dict[str, Started] = {}
    expected = None
    shared = built()
    for name in contenders(case.kind, peer):
        task = built() if case.own_state else shared
        print(f"{name} compiles", flush=True)  # what the log ends with, if the process dies here
        try:
            started[name], results = start(name, task, expected)
        except Exception as error:
            if name == EAGER:
                raise
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_LENGTH]
            started[name] = Started(task, task.program, Outcome(error=said))
        if name == EAGER:
            expected = results
    return started


@dataclass(slots=True)
class Series:
    """Something that is called, and what its calls cost, round by round."""

    call: Callable[[], Any]
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)

    def settle(self) -> None:
        """See how many calls make a time."""
        self.repeats = max(1, min(MOST_REPEATS, round(LEAST_SECONDS / seconds_of(self.call))))

    def round(self) -> None:
        """Call it, and note the means."""
        faults, begin = page_faults(), time.perf_counter()
        for _ in range(self.repeats):
            self.call()
        self.seconds.append((time.perf_counter() - begin) / self.repeats)
        self.faults.append((page_faults() - faults) / self.repeats)


def interleave(all_series: Sequence[Series], budget: Budget) -> float | None:
    """Call all in turn, round after round; the share of the cores that others used meanwhile."""
    for _ in range(SETTLING_ROUNDS):
        for series in all_series:
            series.settle()
    order = list(all_series)
    gc.collect()
    gc.disable()
    begin = read_cpu()
    try:
        for number in range(budget.rounds):
            if number >= LEAST_ROUNDS and time.perf_counter() > begin.wall + budget.seconds:
                break
            for series in order:
                series.round()
            order = order[1:] + order[:1]
    finally:
        gc.enable()
    return foreign_share(begin, read_cpu(), os.cpu_count() or 1)


def graphs_captured() -> int:
    """How many graphs Dynamo has captured in this process."""
    return int(counters["stats"]["unique_graphs"])


def with_times(outcome: Outcome, series: Series | None) -> Outcome:
    """The outcome with what was timed."""
    if series is None:
        return outcome
    return replace(
        outcome,
        times=tuple(series.seconds),
        repeats=series.repeats,
        faults=statistics.fmean(series.faults),
    )


def measure(case: Case, build: Callable[[], Task], peer: bool, budget: Budget) -> Row:
    """The whole row."""
    torch.set_num_threads(THREADS)
    pages_kept = reuses_pages()
    started = start_all(case, build, peer)
    eager = started[EAGER]
    moved = moved_bytes(eager.task, eager.task.step(eager.program))
    flops = count_flops(eager.task)
    copies = Series(copy_call(moved))
    products = [Series(product_call())] if flops else []
    timed = {
        name: Series(partial(contender.task.step, contender.program))
        for name, contender in started.items()
        if contender.outcome.error is None
    }
    print("calls are timed", flush=True)
    graphs = graphs_captured()
    foreign = interleave([copies, *products, *timed.values()], budget)
    return Row(
        case.name,
        case.kind,
        conditions(),
        datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        outcomes={
            name: with_times(contender.outcome, timed.get(name))
            for name, contender in started.items()
        },
        moved=moved,
        flops=flops,
        copies=tuple(copies.seconds),
        products=tuple(products[0].seconds) if products else (),
        foreign=foreign,
        pages_kept=pages_kept,
        recompiled=graphs_captured() > graphs,
    )


def main(
    kind: str,
    name: str,
    file: Path,
    rounds: Annotated[int, typer.Option()] = 40,
    seconds: Annotated[float, typer.Option()] = 20,
    peer: Annotated[bool, typer.Option()] = True,
) -> None:
    """Measure one row and store it."""
    for variable in KEEPS_PAGES:  # read when the process began; a C++ compiler is not to see them
        os.environ.pop(variable, None)
    case = find(kind, name)
    store(measure(case, case.full, peer, Budget(rounds, seconds)), file)


if __name__ == "__main__":
    typer.run(main)
