"""A chain that waits for memory: tensors of 256 MiB, and results that the caller drops each time.

`python -m benchmarks.memory_chain`, or `make bench`.  The program, on rows of 8192 numbers,

    y = gelu(x * scale + shift)
    p = softmax(y, rows)
    z = p / max(p)

cannot be one pass: its last line needs the largest of all numbers, so something of x's size has to
lie in memory between (or be computed twice).  What a call makes and drops is given back to the
system by glibc's allocator, as users have it, and every page of it is faulted in again at the next
call.  So there are two tables, each from a process of its own: with that allocator, and with one
that keeps its pages (machine.py).  In both, contenders are called in turn.

Memory is taken contender by contender before calls are timed (peaks.py).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import Tensor
from torch.nn.functional import gelu

from benchmarks.alone import DiedError, left_by
from benchmarks.case import Case, Task
from benchmarks.machine import KEEPS_PAGES, THREADS, has_compiler
from benchmarks.peaks import MEBIBYTE, peak
from benchmarks.record import EAGER, INDUCTOR, STATOR, Outcome
from benchmarks.report import NOTHING, TITLES, number, without_folders
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import (
    Budget,
    Series,
    Started,
    graphs_captured,
    interleave,
    start_all,
    with_times,
)
from benchmarks.spread import Spread
from benchmarks.work import copied_bytes, copy_call, moved_bytes

SIDE: Final = 8192  # rows and columns: 256 MiB of float32 in all
TINY: Final = 64
ALLOCATORS: Final = {"glibc's own allocator": False, "an allocator that keeps its pages": True}
ONE_TABLE: Final = (
    "import typer; from benchmarks.memory_chain import one_table; typer.run(one_table)"
)


def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Two passes: rows first, then all of it against its maximum."""
    p = torch.softmax(gelu(x * scale + shift), dim=-1)
    return p / p.amax()


def task(side: int) -> Task:
    """The chain with its inputs."""
    return Task(chain, (torch.randn(side, side), torch.randn(side), torch.randn(side)))


CASE: Final = Case("chain", "micro", partial(task, SIDE), partial(task, TINY))


@dataclass(frozen=True, slots=True)
class Fared:
    """How one contender did."""

    error: str | None = None
    times: tuple[float, ...] = ()  # seconds of one call, round by round
    faults: float = 0.0  # pages faulted in, a call
    peak: int | None = None  # bytes beyond the inputs
    predicted: int | None = None  # the compiler's own idea of that
    graphs: int = 0  # that the backend was given


@dataclass(frozen=True, slots=True)
class Found:
    """One table: all contenders under one allocator."""

    allocator: str
    conditions: str = ""
    error: str | None = None  # why there is nothing below
    contenders: dict[str, Fared] = field(default_factory=dict)
    moved: int = 0  # bytes that must move: inputs read once, the output written once
    copies: tuple[float, ...] = ()  # seconds of a copy of `copied_bytes(moved)`, round by round
    foreign: float | None = None  # share of the cores that others used
    recompiled: bool = False  # a graph was compiled while calls were timed

    def speed(self, name: str, over: str) -> Spread | None:
        """How many times as fast as another contender."""
        ours, theirs = self.contenders.get(name), self.contenders.get(over)
        if not ours or not theirs or not ours.times or not theirs.times:
            return None
        return Spread.of_ratios(theirs.times, ours.times)

    def rate(self, name: str) -> float | None:
        """Gigabytes a second, of the bytes that must move."""
        times = self.contenders[name].times
        return self.moved / statistics.median(times) / 1e9 if times else None

    def copy_rate(self) -> float | None:
        """Gigabytes a second of a copy into warm memory."""
        copied = copied_bytes(self.moved)
        return copied / statistics.median(self.copies) / 1e9 if self.copies else None


def predicted_peak(name: str) -> int | None:
    """What Stator expects its program to need beyond the inputs, where it says so."""
    if name != STATOR:
        return None
    import stator  # here, for one that does not even import leaves the others their figures

    found = getattr(stator.last_compilation(), "predicted_peak", None)
    return None if found is None else int(found)


def fared(started: Started, series: Series | None) -> Fared:
    """What is told of a contender, but for its memory."""
    outcome: Outcome = with_times(started.outcome, series)
    return Fared(outcome.error, outcome.times, outcome.faults, graphs=outcome.graphs)


def measure(allocator: str, build: Callable[[], Task], peer: bool, budget: Budget) -> Found:
    """One table, in this process as its allocator is."""
    started = start_all(CASE, build, peer)
    calls = {
        name: partial(one.task.step, one.program)
        for name, one in started.items()
        if one.outcome.error is None
    }
    # Before anything else is compiled: its record would take this one's place.
    predicted = {name: predicted_peak(name) for name in calls}
    moved = moved_bytes(started[EAGER].task, calls[EAGER]())
    peaks = {name: peak(call) for name, call in calls.items()}
    print("calls are timed", flush=True)
    copies, timed = Series(copy_call(moved)), {name: Series(call) for name, call in calls.items()}
    graphs = graphs_captured()
    foreign = interleave([copies, *timed.values()], budget)
    return Found(
        allocator,
        conditions(),
        contenders={
            name: replace(
                fared(one, timed.get(name)),
                peak=peaks.get(name),
                predicted=predicted.get(name),
            )
            for name, one in started.items()
        },
        moved=moved,
        copies=tuple(copies.seconds),
        foreign=foreign,
        recompiled=graphs_captured() > graphs,
    )


def to_text(found: Found) -> str:
    """A table as it travels from its process."""
    return json.dumps(asdict(found), indent=1)


def from_text(text: str) -> Found:
    """A table as it arrives."""
    stored: dict[str, Any] = json.loads(text)
    contenders = {
        name: Fared(**{**value, "times": tuple(value["times"])})
        for name, value in stored["contenders"].items()
    }
    return Found(**{**stored, "copies": tuple(stored["copies"]), "contenders": contenders})


def in_a_process(allocator: str, options: list[str]) -> Found:
    """One table, from a process that has the allocator; what went wrong otherwise."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEPS_PAGES}
    if ALLOCATORS[allocator]:
        environment |= KEEPS_PAGES
    try:
        return from_text(left_by(ONE_TABLE, [allocator], options, environment))
    except DiedError as error:
        return Found(allocator, error=str(error))


def line(found: Found, name: str) -> list[str]:
    """One row of a table."""
    one = found.contenders[name]
    if one.error:
        return [TITLES[name], "error", *[NOTHING] * 6]
    speeds = [None if over == name else found.speed(name, over) for over in (EAGER, INDUCTOR)]

    def size(value: int | None) -> str:
        return number(None if value is None else value / MEBIBYTE, ".0f")

    return [
        TITLES[name],
        f"{Spread.of([1e3 * second for second in one.times]):.1f}",
        *(NOTHING if speed is None else f"{speed:.2f}" for speed in speeds),
        number(found.rate(name), ".1f"),
        f"{one.faults:.0f}",
        size(one.peak),
        size(one.predicted),
    ]


def remarks(found: Found) -> list[str]:
    """What went wrong or was disturbed, a line each."""
    lines = [
        f"- {TITLES[name]}: {without_folders(one.error)}"
        for name, one in found.contenders.items()
        if one.error
    ]
    if found.recompiled:
        lines.append("- disturbed: a graph was compiled while calls were timed")
    return lines


def table(found: Found) -> str:
    """One table, under its heading."""
    heading = f"With {found.allocator}:"
    if found.error:
        return f"{heading} not measured: {without_folders(found.error)}"
    headings = [
        "contender",
        "ms",
        "over eager",
        "over Inductor",
        "GB/s",
        "faults a call",
        "peak MiB",
        "predicted MiB",
    ]
    rows = [line(found, name) for name in found.contenders]
    rounds = max(len(one.times) for one in found.contenders.values())
    note = (
        f"{rounds} rounds; a copy into warm memory {number(found.copy_rate(), '.1f')} GB/s; others"
        f" used {number(found.foreign, '.0%')} of the cores. {found.conditions}."
    )
    parts = [heading, markdown_table(headings, rows), note, "\n".join(remarks(found))]
    return "\n\n".join(part for part in parts if part)


def report(tables: list[Found], side: int = SIDE) -> str:
    """The section of RESULTS.md."""
    legend = (
        f"`p = softmax(gelu(x * scale + shift), -1); p / p.amax()` on {side}×{side} float32,"
        f" {4 * side**2 / MEBIBYTE:.0f} MiB; the result is dropped at each call. Speed is"
        " above 1 where faster: median and quartiles, contenders called in turn. *GB/s* is of the"
        " bytes that must move, inputs read once and the result written once; *peak* is memory"
        " beyond the inputs, the result included, *predicted* what the compiler said of it. The"
        " aim: at least 1.5 of Inductor's speed. Measured by `make bench`."
    )
    return "\n\n".join([legend, *(table(found) for found in tables)]) + "\n"


def one_table(
    allocator: str,
    file: Path,
    rounds: Annotated[int, typer.Option()] = 20,
    seconds: Annotated[float, typer.Option()] = 40,
    peer: Annotated[bool, typer.Option()] = True,
    tiny: Annotated[bool, typer.Option()] = False,
) -> None:
    """Measure one table in this process and store it."""
    for variable in KEEPS_PAGES:  # read when the process began; a C++ compiler is not to see them
        os.environ.pop(variable, None)
    torch.set_num_threads(THREADS)
    build = CASE.tiny if tiny else CASE.full
    file.write_text(to_text(measure(allocator, build, peer, Budget(rounds, seconds))))


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each contender, in turn.")] = 20,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 40,
    peer: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
    tiny: Annotated[bool, typer.Option(help="Small tensors, to try it out.")] = False,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print both tables and write them down."""
    options = [f"--rounds={rounds}", f"--seconds={seconds}"]
    options += ["--peer" if peer and has_compiler() else "--no-peer"]
    options += ["--tiny"] if tiny else []
    tables = [in_a_process(allocator, options) for allocator in track(ALLOCATORS)]
    text = report(tables, TINY if tiny else SIDE)
    print(text)
    if write and not tiny:
        write_section("memory_chain", text)


if __name__ == "__main__":
    typer.run(main)
