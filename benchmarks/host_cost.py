"""What a kernel costs the host: graphs of 1, 10 and 100 kernels that have next to nothing to do.

`python -m benchmarks.host_cost`, or `make bench`.  The first graph is `x + 1` on eight elements,
the others are chains of maxima over the rows of an 8×8 matrix,

    row = x.amax(1);  row = (x + row).amax(1);  row = (x + row).amax(1);  …

where each kernel needs all that the one before it made, so that no two can share their loops.  That
is counted: Stator's launches in its own dump, Inductor's kernels by its metrics, and the calls of
C++ functions that it writes.  On a CPU Inductor puts the loops of kernels that follow each other
into one function, whatever they need; one contender is kept from it.

A call pays Dynamo's guards and frame, then the backend.  With a backend that returns at once what
it has, there is nothing behind Dynamo, so

    beyond Dynamo  = compiled with a backend - compiled with that one

is a backend's own time, kernels included: what stands beside the time of a call that is not
compiled.  (Behind Dynamo eager's operators take longer than by themselves, so the bar is a little
higher than one that takes Dynamo's part from backend="eager", as call_cost.py does.)  All programs
of all contenders are called in turn in one process, without gradients, and every difference is
taken within a round.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Final, TypeAlias
from unittest import mock

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import THREADS, has_compiler
from benchmarks.report import NOTHING, number
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread

WIDTH: Final = 8  # elements of every result
LENGTHS: Final = (1, 10, 100)  # kernels
TINY: Final = (1, 2, 4)

Function: TypeAlias = Callable[[Tensor], Tensor]
Times: TypeAlias = dict[str, list[float]]  # microseconds of a call by contender, round by round


def plus_one(x: Tensor) -> Tensor:
    """One kernel: the smallest program there is."""
    return x + 1


def maxima(kernels: int) -> Function:
    """A chain of as many kernels, each of which reads all of the result before."""

    def chain(x: Tensor) -> Tensor:
        row = x.amax(1)
        for _ in range(kernels - 1):
            row = (x + row).amax(1)
        return row

    return chain


@dataclass(frozen=True, slots=True)
class Program:
    """A function and how many kernels it is."""

    kernels: int

    @property
    def title(self) -> str:
        """As tables name it."""
        return "`x + 1`" if self.kernels == 1 else f"{self.kernels} kernels"

    def function(self, name: str) -> Function:
        """The function under a code object of its own.

        Dynamo keeps its compiled frames by code object and searches them one by one: contenders
        that shared one would pay for each other.
        """
        shared: Any = plus_one if self.kernels == 1 else maxima(self.kernels)
        code = shared.__code__.replace(co_name=f"{name}_{self.kernels}")
        return FunctionType(code, globals(), code.co_name, None, shared.__closure__)

    def input(self) -> Tensor:
        """What it is called with."""
        return torch.randn(WIDTH) if self.kernels == 1 else torch.randn(WIDTH, WIDTH)


def at_once(module: Any, inputs: Sequence[Any]) -> Callable[..., tuple[Tensor]]:
    """A backend that leaves nothing to do at run time: a result is there already."""
    result = (torch.ones(WIDTH),)
    return lambda *_: result


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a program."""

    title: str
    backend: str | Callable[..., Any] | None  # None: not compiled
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False  # Inductor: a C++ function for each kernel

    @property
    def name(self) -> str:
        """The title as an identifier."""
        return re.sub(r"\W+", "_", self.title)


NOT_COMPILED: Final = Contender("not compiled", None)
DYNAMO: Final = Contender("Dynamo alone", at_once)
EAGER: Final = Contender("Dynamo, then eager", "eager")
STATOR: Final = Contender("stator", "stator", STATOR_OPTIONS)
PYTHON: Final = Contender(
    'stator, executor="python"', "stator", {**STATOR_OPTIONS, "executor": "python"}
)
PEERS: Final = (
    Contender("Inductor", "inductor"),
    Contender("Inductor, cpp_wrapper", "inductor", {"cpp_wrapper": True}),
    Contender("Inductor, functions apart", "inductor", apart=True),
)


def contenders(peer: bool) -> list[Contender]:
    """Who takes part."""
    return [NOT_COMPILED, DYNAMO, EAGER, STATOR, PYTHON, *(PEERS if peer else ())]


@dataclass(frozen=True, slots=True)
class Made:
    """What a compiler made of a program, where it says so."""

    kernels: int | None = None  # loop nests
    launches: int | None = None  # calls of what they are compiled to


@dataclass(frozen=True, slots=True)
class Started:
    """A contender with a program that it has compiled."""

    contender: Contender
    program: Program
    call: Callable[[], Tensor]
    made: Made


def start(contender: Contender, program: Program) -> Started:
    """Compile, check the result, count the kernels."""
    x = program.input()
    function = program.function(contender.name)
    if contender.backend is None:
        return Started(contender, program, partial(function, x), Made())
    expected = function(x)
    if contender.backend == "stator":
        compiled, made = _with_stator(contender, function, x)
    elif contender.backend == "inductor":
        compiled, made = _with_inductor(contender, function, x)
    else:
        compiled, made = torch.compile(function, backend=contender.backend), Made()
    result = compiled(x)
    if contender.backend is not at_once:
        torch.testing.assert_close(result, expected)
    if contender.backend == "stator" and made.launches != program.kernels:
        raise ValueError(
            f"{contender.title} launches {made.launches} kernels, not {program.kernels}: "
            "the chain no longer shows what a kernel costs"
        )
    return Started(contender, program, partial(compiled, x), made)


def launches_in(plan: str) -> int:
    """How many steps of a plan launch a kernel, from its text."""
    return len(re.findall(r"^.*\bkernel_\d+\(", plan, re.MULTILINE))


def _with_stator(contender: Contender, function: Function, x: Tensor) -> tuple[Function, Made]:
    with tempfile.TemporaryDirectory() as folder:
        options = {**contender.options, "dump_dir": folder}
        compiled: Function = torch.compile(function, backend="stator", options=options)
        compiled(x)
        (plan,) = Path(folder).rglob("*_plan.txt")
        launches = launches_in(plan.read_text(encoding="utf-8"))
    return compiled, Made(launches, launches)


def _with_inductor(contender: Contender, function: Function, x: Tensor) -> tuple[Function, Made]:
    # Here, for it is slow to import, and not needed without the peer.
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    compiled: Function = torch.compile(
        function, backend="inductor", options=dict(contender.options) or None
    )
    metrics.reset()
    with fresh_cache(), _counting_functions(contender.apart) as calls:
        compiled(x)
    return compiled, Made(metrics.generated_kernel_count, len(calls))


@contextmanager
def _counting_functions(apart: bool) -> Iterator[list[None]]:
    """Note each call of a C++ function that Inductor writes; with `apart`, one for each kernel."""
    from torch._inductor.codegen.cpp import CppScheduling, KernelGroup

    calls: list[None] = []
    write = KernelGroup.call_kernel

    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return write(*arguments, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelGroup, "call_kernel", noted))
        if apart:  # a function is closed when it has more arguments than this
            most = mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0)
            stack.enter_context(most)
        yield calls


@dataclass(frozen=True, slots=True)
class Measured:
    """Every program of every contender."""

    programs: tuple[Program, ...]
    times: dict[Program, Times]
    made: dict[tuple[str, Program], Made]
    foreign: float | None  # share of the cores that others used

    def call(self, name: str, program: Program) -> Spread:
        """Microseconds of a call."""
        return Spread.of(self.times[program][name])

    def beyond_dynamo(self, name: str, program: Program) -> Spread | None:
        """Of those, what the backend takes; None where there is none."""
        if name in (NOT_COMPILED.title, DYNAMO.title):
            return None
        times = self.times[program]
        pairs = zip(times[name], times[DYNAMO.title], strict=True)
        return Spread.of([call - less for call, less in pairs])

    def a_kernel(self, name: str) -> Spread:
        """Microseconds that each kernel beyond the first adds."""
        first, last = self.programs[0], self.programs[-1]
        pairs = zip(self.times[last][name], self.times[first][name], strict=True)
        kernels = last.kernels - first.kernels
        return Spread.of([(many - one) / kernels for many, one in pairs])


def measure(lengths: Sequence[int], peer: bool, budget: Budget) -> Measured:
    """Compile all, then call all in turn."""
    torch.manual_seed(SEED)
    torch.compiler.reset()
    programs = tuple(Program(length) for length in lengths)
    wanted = [(contender, program) for program in programs for contender in contenders(peer)]
    with torch.no_grad():
        started = [start(*each) for each in track(wanted, description="compiling")]
        series = [Series(one.call) for one in started]
        foreign = interleave(series, budget)
    times: dict[Program, Times] = {program: {} for program in programs}
    for one, timed in zip(started, series, strict=True):
        times[one.program][one.contender.title] = [1e6 * second for second in timed.seconds]
    made = {(one.contender.title, one.program): one.made for one in started}
    return Measured(programs, times, made, foreign)


def counts_cell(counts: Sequence[int | None]) -> str:
    """One count for each program."""
    known = [str(count) for count in counts if count is not None]
    return " / ".join(known) or NOTHING


def line(measured: Measured, name: str) -> list[str]:
    """One row of the table."""
    made = [measured.made[name, program] for program in measured.programs]
    beyond = [measured.beyond_dynamo(name, program) for program in measured.programs]
    return [
        name,
        *(f"{measured.call(name, program):.1f}" for program in measured.programs),
        *(NOTHING if spread is None else f"{spread:.1f}" for spread in beyond),
        f"{measured.a_kernel(name):.2f}",
        counts_cell([one.kernels for one in made]),
        counts_cell([one.launches for one in made]),
    ]


def verdict(measured: Measured) -> str:
    """The two figures that are asked for, in words."""
    first = measured.programs[0]
    ours = measured.beyond_dynamo(STATOR.title, first)
    eager = measured.call(NOT_COMPILED.title, first)
    return (
        f"Beyond Dynamo, `x + 1` takes stator {ours:.1f} µs, and eager {eager:.1f} µs without it;"
        f" each further kernel takes stator {measured.a_kernel(STATOR.title):.2f} µs, its loops"
        " included. The aim: below eager's, and at most 0.3 µs a kernel."
    )


def report(measured: Measured) -> str:
    """The section of RESULTS.md."""
    titles = [program.title for program in measured.programs]
    headings = [
        "µs a call",
        *titles,
        *(f"{title}, beyond Dynamo" for title in titles),
        "a further kernel",
        "kernels",
        "launches",
    ]
    rows = [line(measured, name) for name in measured.times[measured.programs[0]]]
    rounds = len(next(iter(measured.times[measured.programs[0]].values())))
    return (
        f"`x + 1` on {WIDTH} elements, and chains of maxima over the rows of {WIDTH}×{WIDTH}"
        " elements, without gradients; microseconds a call, median and quartiles of differences"
        " within a round. *Dynamo alone* has a backend that returns at once; *beyond Dynamo* is"
        " what a backend takes longer than that. *a further kernel* is from the shortest program"
        " to the longest. *kernels* are loop nests, *launches* calls of compiled code: on a CPU"
        " Inductor writes one C++ function for kernels that follow each other; *functions apart*"
        " is kept from it.\n\n"
        f"{markdown_table(headings, rows)}\n\n{verdict(measured)}\n\n"
        f"{rounds} rounds; others used {number(measured.foreign, '.0%')} of the cores."
        f" Measured by `make bench`: {conditions()}.\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in which all are called in turn.")] = 400,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 60,
    peer: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
    tiny: Annotated[bool, typer.Option(help="Short chains, to try it out.")] = False,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    torch.set_num_threads(THREADS)
    lengths = TINY if tiny else LENGTHS
    text = report(measure(lengths, peer and has_compiler(), Budget(rounds, seconds)))
    print(text)
    if write and not tiny:
        write_section("host_cost", text)


if __name__ == "__main__":
    typer.run(main)
