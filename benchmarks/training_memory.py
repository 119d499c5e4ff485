"""Memory and time of training steps: `python -m benchmarks.training_memory`, or `make bench`.

Models of such sizes that what the backward keeps is more than the parameters.  Peaks come from a
process for each contender: parameters and inputs are there before, gradients are not.  Large
tensors are mapped there one by one, so that the system counts what is held, not the holes of a
heap.  Times come from one process more, where contenders are called in turn and freed pages are
used again; it runs first, so that Inductor finds its kernels in a cache afterwards.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track

from benchmarks.alone import DiedError, left_by
from benchmarks.case import Program, Task
from benchmarks.contenders import Watch, compiled, contenders
from benchmarks.machine import KEEPS_PAGES, THREADS, has_compiler
from benchmarks.models import convolutional, text, vit
from benchmarks.models.built import Builder
from benchmarks.models.table import MODELS as TABLE
from benchmarks.models.table import training
from benchmarks.peaks import MEBIBYTE, peak
from benchmarks.record import INDUCTOR
from benchmarks.report import NOTHING, TITLES, number, without_folders
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread

GPT2: Final = text.Sizes(layers=6, width=256, heads=4, inner=1024, vocabulary=8192, batch=8)
LLAMA: Final = text.Sizes(
    layers=4, width=256, heads=8, inner=704, vocabulary=8192, key_heads=4, batch=8
)
VIT: Final = vit.Sizes(
    layers=6, width=384, heads=6, inner=1536, image=224, patch=16, classes=1000, batch=8
)
RESNET: Final = convolutional.Sizes(batch=8, image=224, classes=1000)
MODELS: Final[dict[str, Builder]] = {
    "gpt2": partial(text.gpt2, GPT2),
    "vit": partial(vit.vit, VIT),
    "resnet50": partial(convolutional.resnet50, RESNET),
    "llama4": partial(text.llama, LLAMA),
}
ONE_PEAK: Final = (
    "import typer; from benchmarks.training_memory import one_peak; typer.run(one_peak)"
)
ALL_TIMES: Final = (
    "import typer; from benchmarks.training_memory import all_times; typer.run(all_times)"
)
PEER: Final = INDUCTOR
MAPS_TENSORS: Final = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one contender's steps, in bytes beyond parameters and inputs."""

    peak: int | None = None
    predicted: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step of each contender, round by round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    foreign: float | None = None  # share of the cores that others used
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    model: str
    times: Times
    held: dict[str, Held]

    def peak_ratio(self, name: str) -> float | None:
        """A contender's peak over Inductor's."""
        ours, theirs = (self.held[who].peak if who in self.held else None for who in (name, PEER))
        return ours / theirs if ours is not None and theirs else None

    def time_ratio(self, name: str) -> Spread | None:
        """A contender's time over Inductor's."""
        ours, theirs = (self.times.seconds.get(who) for who in (name, PEER))
        return Spread.of_ratios(ours, theirs) if ours and theirs else None


def built(model: str, tiny: bool) -> Task:
    """A model's training step."""
    torch.manual_seed(SEED)
    return training(TABLE[model].tiny if tiny else MODELS[model], TABLE[model].tolerance)


def step(task: Task, program: Program) -> None:
    """One step; gradients are dropped at its end, as an optimizer's next step would."""
    task.step(program)
    for leaf in task.leaves:
        leaf.grad = None


def held_by(name: str, task: Task) -> Held:
    """The peak of a contender's steps, and what it said of it before."""
    from stator.core.events import collected_records

    with collected_records() as records:
        program = compiled(name, task.program, Watch())
        call = partial(step, task, program)
        call()
    said = [(record.step_peak, record.inputs) for record in records]
    predicted = [most - inputs for most, inputs in said if most is not None]
    return Held(peak(call), max(predicted, default=None))


def timed(task: Task, peer: bool, budget: Budget) -> Times:
    """All contenders in turn; one whose gradients are not eager's is not timed."""
    series: dict[str, Series] = {}
    errors: dict[str, str] = {}
    expected: list[Any] | None = None
    for name in contenders("train", peer):
        program = compiled(name, task.program, Watch())
        results = task.results(task.step(program))
        expected = results if expected is None else expected
        error = task.error(expected, results)
        if error <= task.tolerance:
            series[name] = Series(partial(step, task, program))
        else:
            errors[name] = f"wrong by {error:.1e} of eager's result"
    foreign = interleave(list(series.values()), budget)
    return Times({name: one.seconds for name, one in series.items()}, foreign, errors)


def one_peak(
    model: str, name: str, file: Path, tiny: Annotated[bool, typer.Option()] = False
) -> None:
    """Take one contender's peak in this process and store it."""
    _settle()
    file.write_text(json.dumps(asdict(held_by(name, built(model, tiny)))), encoding="utf-8")


def all_times(
    model: str,
    file: Path,
    rounds: Annotated[int, typer.Option()] = 10,
    seconds: Annotated[float, typer.Option()] = 15,
    peer: Annotated[bool, typer.Option()] = True,
    tiny: Annotated[bool, typer.Option()] = False,
) -> None:
    """Time a model's contenders in this process and store it."""
    _settle()
    found = timed(built(model, tiny), peer, Budget(rounds, seconds))
    file.write_text(json.dumps(asdict(found)), encoding="utf-8")


def _settle() -> None:
    os.environ.pop("GLIBC_TUNABLES", None)  # read when the process began; not for a C++ compiler
    torch.set_num_threads(THREADS)


def measure(model: str, peer: bool, tiny: bool, options: Sequence[str]) -> Row:
    """All processes of one model."""
    small = ["--tiny"] if tiny else []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "STATOR_CACHE": "0"}
        try:
            options = [*options, "--peer" if peer else "--no-peer", *small]
            stored = left_by(ALL_TIMES, [model], options, environment | KEEPS_PAGES)
            times = Times(**json.loads(stored))
        except DiedError as error:
            times = Times(errors={"": str(error)})
        held = {}
        for name in contenders("train", peer):
            try:
                stored = left_by(ONE_PEAK, [model, name], small, environment | MAPS_TENSORS)
                held[name] = Held(**json.loads(stored))
            except DiedError as error:
                held[name] = Held(error=str(error))
    return Row(model, times, held)


def line(row: Row, name: str) -> list[str]:
    """One contender of a model, in the table."""
    times, held = row.times.seconds.get(name), row.held[name]
    ratio = None if name == PEER else row.time_ratio(name)

    def size(value: int | None) -> str:
        return number(None if value is None else value / MEBIBYTE, ".0f")

    return [
        row.model,
        TITLES[name],
        f"{Spread.of([1e3 * second for second in times]):.0f}" if times else NOTHING,
        NOTHING if ratio is None else f"{ratio:.2f}",
        size(held.peak),
        number(None if name == PEER else row.peak_ratio(name), ".2f"),
        size(held.predicted),
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What went wrong, a line each."""
    return [
        f"- {row.model}{', ' if name else ''}{TITLES.get(name, name)}: {without_folders(error)}"
        for row in rows
        for name, error in (
            *row.times.errors.items(),
            *((name, held.error) for name, held in row.held.items()),
        )
        if error
    ]


def report(rows: Sequence[Row]) -> str:
    """The section of RESULTS.md."""
    legend = (
        "A training step: forward, loss, gradients of all parameters, which are dropped at its end."
        " *Peak* is memory beyond parameters and inputs, each contender in a process of its own;"
        " *predicted* what the compiler said of it. Times are medians and quartiles, contenders"
        " called in turn; ratios are below 1 where less. The aim: at most Inductor's memory, in at"
        f" most its time. {conditions()}."
    )
    headings = ["model", "contender", "ms", "of Inductor's time", "peak MiB"]
    headings += ["of Inductor's peak", "predicted MiB"]
    table = markdown_table(headings, [line(row, name) for row in rows for name in row.held])
    shares = [row.times.foreign for row in rows if row.times.foreign is not None]
    used = f"Others used up to {max(shares):.0%} of the cores." if shares else ""
    parts = [legend, table, used, "\n".join(remarks(rows))]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(
    only: Annotated[str, typer.Option(help="One model.")] = "",
    rounds: Annotated[int, typer.Option(help="Steps of each contender, in turn.")] = 10,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 15,
    peer: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
    tiny: Annotated[bool, typer.Option(help="Small models, to try it out.")] = False,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    if only and only not in MODELS:
        raise typer.BadParameter(f"there are: {', '.join(MODELS)}", param_hint="--only")
    torch.set_num_threads(THREADS)
    options = [f"--rounds={rounds}", f"--seconds={seconds}"]
    names = [only] if only else list(MODELS)
    rows = [measure(name, peer and has_compiler(), tiny, options) for name in track(names)]
    found = report(rows)
    print(found)
    if write and not tiny and not only:
        write_section("training_memory", found)


if __name__ == "__main__":
    typer.run(main)
