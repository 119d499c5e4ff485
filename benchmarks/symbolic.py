"""Kernels for any size beside kernels for one: `python -m benchmarks.symbolic`, or `make bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track

from benchmarks.case import Case, Task
from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.kernels import KERNELS
from benchmarks.machine import KEEPS_PAGES, THREADS
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread

# An optimizer's step has no sizes to vary, and losses of this size take seconds each.
LEFT_OUT: Final = frozenset({"adamw_foreach", "cross_entropy_train"})


def compiled(task: Task, *, dynamic: bool) -> Any:
    """The program for the sizes of its inputs, or for all sizes."""
    torch._dynamo.reset()  # else the second compilation takes the first one's code
    program = torch.compile(task.program, backend="stator", dynamic=dynamic, options=STATOR_OPTIONS)
    task.step(program)
    return program


def measure(case: Case, budget: Budget, *, tiny: bool = False) -> tuple[Spread, float, float]:
    """Time for any size over time for one; milliseconds of both."""
    torch.manual_seed(SEED)
    task = case.tiny() if tiny else case.full()
    one = Series(partial(task.step, compiled(task, dynamic=False)))
    every = Series(partial(task.step, compiled(task, dynamic=True)))
    interleave([one, every], budget)
    ratio = Spread.of_ratios(every.seconds, one.seconds)
    first, second = (1e3 * Spread.of(series.seconds).median for series in (one, every))
    return ratio, first, second


def report(rows: Sequence[list[str]]) -> str:
    """The section of RESULTS.md."""
    headings = ["kernel", "any size / one size", "one size, ms", "any size, ms"]
    return (
        "One kernel for all sizes (`dynamic=True`) beside the one for these sizes"
        f" (`dynamic=False`), called in turn; median and quartiles. {conditions()}.\n\n"
        f"{markdown_table(headings, list(rows))}\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each, in turn.")] = 20,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 4,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    if any(name not in os.environ for name in KEEPS_PAGES):  # read when a process begins
        arguments = [sys.executable, "-m", "benchmarks.symbolic", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **KEEPS_PAGES})
    torch.set_num_threads(THREADS)
    rows = []
    for case in track([case for case in KERNELS if case.name not in LEFT_OUT]):
        ratio, one, every = measure(case, Budget(rounds, seconds))
        rows.append([case.name, f"{ratio:.2f}", f"{one:.2f}", f"{every:.2f}"])
    text = report(rows)
    print(text)
    if write:
        write_section("symbolic", text)


if __name__ == "__main__":
    typer.run(main)
