"""How the debugger does on 60 bugs: `python -m benchmarks.faults`, or `make faults`.

Each bug is put into the compiler; a graph of 200 to 3,000 nodes that shows it is minimised, and the
step of the compiler that is to blame is searched for on what is left.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.bug_graphs import make_graph
from benchmarks.bugs import BUGS, Bug
from benchmarks.results import conditions, markdown_table, write_section
from stator.core import faults
from stator.debug.minify.blame import blame
from stator.debug.minify.case import case_of
from stator.debug.minify.checks import needs_isolation
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import class_of
from stator.debug.minify.minifier import Minified, Wishes, minimise
from stator.debug.minify.script import read_script
from stator.errors import StatorError

COUNTS: Final = (200, 300, 500, 800, 1200, 2000, 3000)  # nodes, in turn
FEW: Final = 5  # nodes that may be left
SECONDS: Final = 60.0  # that it may take
HANGS: Final = 30.0  # seconds after which a script of a few nodes does not end any more
SEEDS: Final = 3  # graphs to try, where one does not show the bug
HEADINGS: Final = ["bug", "class", "nodes", "left", "class kept", "s", "guilty", "named"]


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one bug."""

    bug: Bug
    kind: str
    begun: int
    left: int
    kept: bool
    seconds: float
    verdict: str
    named: bool

    @property
    def is_small(self) -> bool:
        """Whether the aim is met."""
        return self.left <= FEW and self.kept and self.seconds < SECONDS

    def cells(self) -> list[str]:
        """A row of the table."""
        kept, named = ("yes" if yes else "no" for yes in (self.kept, self.named))
        sizes = [str(self.begun), str(self.left)]
        return [self.bug.name, self.kind, *sizes, kept, f"{self.seconds:.1f}", self.verdict, named]


@contextmanager
def planted(number: int) -> Iterator[Bug]:
    """A bug in the compiler of this process, and of those that it starts."""
    bug = BUGS[number]
    os.environ["STATOR_FAULT"] = f"benchmarks.bugs:plant:{number}"
    try:
        with faults.fault(bug.place, bug.fault):
            yield bug
    finally:
        del os.environ["STATOR_FAULT"]


def hunt(number: int, count: int) -> Found:
    """Minimise a graph that shows a bug, and find the guilty step."""
    with planted(number) as bug, tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            small = _minimised(bug, number, count, Path(folder))
        except StatorError as error:
            return Found(bug, "-", count, count, False, 0.0, str(error).partition("\n")[0], False)
        seconds = time.perf_counter() - start  # with the start of a worker and a first look
        assert small.script is not None, "a folder was given"
        kept = _is_kept(small.script, small.failure)
        kind = f"{'dynamic ' if small.failure.dynamic else ''}{small.failure.kind}"
        again = read_script(small.script)
        guilty = blame(again.case, again.how, small.failure)
        said = " ".join((*guilty.rewrites, *guilty.passes, *guilty.nodes))
        named = guilty.stage == bug.stage and bug.blame in said
        what = (guilty.rewrites or guilty.passes or guilty.nodes or ["?"])[0]
        verdict = f"{guilty.stage} {what.partition(': ')[2]}"
        return Found(bug, kind, small.begun, small.left, kept, seconds, verdict, named)


def _is_kept(script: Path, failure: Failure) -> bool:
    """Whether the script that was written shows the same failure."""
    if not needs_isolation(failure):
        again = read_script(script)
        return class_of(again.case, again.how) == failure
    try:
        done = subprocess.run(
            [sys.executable, script], capture_output=True, timeout=HANGS, check=False
        )
    except subprocess.TimeoutExpired:
        return failure.kind == "hang"
    return failure.kind == "crash" and done.returncode < 0  # by a signal


def _minimised(bug: Bug, number: int, count: int, folder: Path) -> Minified:
    for seed in range(SEEDS):
        module, inputs = make_graph(count, 100 * number + seed)
        try:
            isolate = None if bug.takes_process else False
            wishes = Wishes(dynamic=bug.dynamic, folder=folder, isolate=isolate)
            return minimise(case_of(module, inputs), None, wishes)
        except StatorError as error:
            if "does not fail" not in str(error) or seed == SEEDS - 1:
                raise
    raise AssertionError("a loop without end")


def report(found: Sequence[Found]) -> str:
    """The section of RESULTS.md."""
    small = sum(one.is_small for one in found)
    named = sum(one.named for one in found)
    took = [one.seconds for one in found]
    return (
        f"{len(found)} bugs, put into passes, rules, lowering and code generation by fault hooks,"
        " each in a graph of 200 to 3,000 nodes that compute. What hangs or kills its process is"
        " judged in others, the rest in one. *left*: nodes of the minimised graph; *s*: all of it,"
        " until the script is written; *class kept*: the script shows the same; *guilty*: what"
        f" bisection of the minimised graph says. Small means {FEW} nodes or fewer, of the same"
        f" class, in less than {SECONDS:.0f} s: **{small} of {len(found)}**; the guilty step is"
        f" named in **{named} of {len(found)}**. Median"
        f" {statistics.median(took):.1f} s, the longest {max(took):.1f} s."
        f" {conditions()}.\n\n{markdown_table(HEADINGS, [one.cells() for one in found])}\n"
    )


def main(
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
    only: Annotated[list[int] | None, typer.Option(help="Numbers of bugs; all if none.")] = None,
) -> None:
    """Hunt every bug, print the table and write it down."""
    torch.set_num_threads(1)
    found = []
    for number in track(only or range(len(BUGS)), console=Console(stderr=True)):
        found.append(hunt(number, COUNTS[number % len(COUNTS)]))
        print(number, *found[-1].cells(), sep=" | ", flush=True)
    table = Table(*HEADINGS)
    for one in found:
        table.add_row(*one.cells())
    Console(width=160).print(table)
    print(report(found))
    if write and not only:
        write_section("faults", report(found))


if __name__ == "__main__":
    typer.run(main)
