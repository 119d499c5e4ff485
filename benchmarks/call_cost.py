"""What one call of a compiled function costs beyond its work: `x + 1` on eight elements.

A call through torch.compile pays Dynamo (guards, the compiled frame) and then the backend (the
wrapper around the graph).  With backend="eager" there is nothing behind Dynamo, so

    Dynamo's part     = compiled with "eager" - not compiled
    a backend's part  = compiled with it      - compiled with "eager"

All contenders run in turn in one process; every difference is taken within a round.  Rounds are
many and short, so that whatever else the machine does falls on few of them.
"""

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Annotated, Final

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.machine import has_compiler
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.spread import Spread

NOT_COMPILED: Final = "not compiled"
DYNAMO: Final = "eager"
IMPORT_SECONDS: Final = (
    "import time, torch; t = time.perf_counter(); import stator; print(time.perf_counter() - t)"
)


def plus_one(x: Tensor) -> Tensor:
    """The whole program."""
    return x + 1


def compiled_with(backend: str) -> Callable[[Tensor], Tensor]:
    """`plus_one` behind a backend, under a code object of its own.

    Dynamo keeps its compiled frames by code object and searches them one by one: contenders that
    shared one would pay for each other.
    """
    code = plus_one.__code__.replace(co_name=f"plus_one_{backend}")
    function = FunctionType(code, globals())
    if backend == NOT_COMPILED:
        return function
    # Strict: a fallback to eager would look fast.
    options = {"strict": True, "cache": False} if backend == "stator" else None
    compiled: Callable[[Tensor], Tensor] = torch.compile(function, backend=backend, options=options)
    return compiled


def forward(f: Callable[[Tensor], Tensor], x: Tensor, _: Tensor) -> None:
    """One call."""
    f(x)


def forward_backward(f: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> None:
    """One call and its gradient."""
    torch.autograd.grad(f(x), x, tangent)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call the function."""

    name: str
    grad_mode: bool
    needs_grad: bool
    step: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], None]


VARIANTS: Final = (
    Variant("inference", grad_mode=False, needs_grad=False, step=forward),
    Variant("plain", grad_mode=True, needs_grad=False, step=forward),
    Variant("forward, for training", grad_mode=True, needs_grad=True, step=forward),
    Variant("forward and backward", grad_mode=True, needs_grad=True, step=forward_backward),
)


def microseconds(variant: Variant, f: Callable[[Tensor], Tensor], calls: int) -> float:
    """Mean time of one call, over `calls` of them."""
    x = torch.ones(8, requires_grad=variant.needs_grad)
    tangent = torch.ones(8)
    step = variant.step
    begin = time.perf_counter_ns()
    for _ in range(calls):
        step(f, x, tangent)
    return (time.perf_counter_ns() - begin) / calls / 1e3


def measure(
    variant: Variant, backends: list[str], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds of a call, for each contender, round by round."""
    torch.compiler.reset()
    contenders = {name: compiled_with(name) for name in [NOT_COMPILED, *backends]}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.set_grad_enabled(variant.grad_mode):
        for f in contenders.values():
            microseconds(variant, f, calls)  # compile, and warm up
        gc.collect()
        gc.disable()
        try:
            for _ in track(range(rounds), description=f"{variant.name:24}"):
                for name, f in contenders.items():
                    times[name].append(microseconds(variant, f, calls))
        finally:
            gc.enable()
    return times


def parts(times: dict[str, list[float]]) -> dict[str, Spread]:
    """Each contender's own share: the call itself, Dynamo's part, then each backend's part."""

    def beyond(name: str, other: str) -> Spread:
        pairs = zip(times[name], times[other], strict=True)
        return Spread.of([cost - less for cost, less in pairs])

    backends = [name for name in times if name not in (NOT_COMPILED, DYNAMO)]
    return {
        NOT_COMPILED: Spread.of(times[NOT_COMPILED]),
        "Dynamo": beyond(DYNAMO, NOT_COMPILED),
        **{name: beyond(name, DYNAMO) for name in backends},
    }


def import_milliseconds(runs: int) -> Spread:
    """Time of `import stator` in a fresh process that has torch already."""
    command = [sys.executable, "-c", IMPORT_SECONDS]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in track(range(runs), description=f"{'import stator':24}")
    ]
    return Spread.of([1e3 * float(output) for output in outputs])


def report(headings: list[str], rows: list[list[str]], importing: Spread) -> str:
    """The section of RESULTS.md."""
    return (
        f"## What a call costs\n\n`x + 1` on 8 elements; microseconds a call, median and quartiles."
        " *Dynamo* is what `torch.compile` with nothing behind it adds to the call; the row of a"
        " backend is what it adds to that."
        f" Measured by `make bench`: {conditions()}.\n\n"
        f"{markdown_table(headings, rows)}\n\n"
        f"`import stator` costs {importing} ms beyond torch, in a fresh process.\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in which every contender runs once.")] = 1000,
    calls: Annotated[int, typer.Option(help="Calls of a contender in one round.")] = 20,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    backends = [DYNAMO, "aot_eager", "stator", *(["inductor"] if has_compiler() else [])]
    shares = {
        variant.name: parts(measure(variant, backends, rounds, calls)) for variant in VARIANTS
    }
    importing = import_milliseconds(runs=9)
    headings = ["µs a call", *shares]
    contenders = next(iter(shares.values()))
    rows = [[name, *(str(spreads[name]) for spreads in shares.values())] for name in contenders]
    table = Table(*headings, title="What a call costs", caption=conditions(), box=box.SIMPLE)
    for row in rows:
        table.add_row(*(cell.replace(" (", "\n(") for cell in row))
    console = Console()
    console.print(table)
    console.print(f"import stator: {importing} ms beyond torch")
    if write:
        write_section("call_cost", report(headings, rows, importing))


if __name__ == "__main__":
    typer.run(main)
