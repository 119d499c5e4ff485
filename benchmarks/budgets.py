"""Memory along budgets: `python -m benchmarks.budgets`, or `make bench`.

What is promised: a step holds what was foreseen, within a twentieth; less budget never takes more
memory; gradients are the same at every budget; and without a budget no step is slower than one
that saves everything.

Peaks are counted, not read from the system: bytes that torch's allocator handed out, blocks of our
pool and our arenas, each at its highest mark.  Others on the machine do not change them, so models
are measured at the same time, each in a process of its own, at one budget after the other.  Times
are another matter: `--times` takes them, one model at a time, and wants the machine for itself.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.alone import DiedError, left_by
from benchmarks.case import Program, Task
from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import KEEPS_PAGES, THREADS
from benchmarks.models import convolutional, text, vit
from benchmarks.models.built import Builder, Built
from benchmarks.models.table import MODELS as TABLE
from benchmarks.models.table import training
from benchmarks.peaks import MEBIBYTE
from benchmarks.report import NOTHING, number, without_folders
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import ERROR_LENGTH, SEED, Budget, Series, interleave
from benchmarks.spread import Spread
from benchmarks.training_memory import GPT2, LLAMA, VIT, Times, step

AT_ONCE: Final = 2  # models whose peaks are taken together: compilers have one thread each
BUDGETS: Final = tuple(part / 20 for part in range(20, -1, -1))
MOST_SECONDS: Final = 60.0  # that a model's timed steps may take: fewer rounds, if they are over
CLOSE: Final = 0.05  # how far a step may be from what was foreseen
LEVEL: Final = 1e-3  # a rise below this is of scalars and masks
PLACES: Final = ("arena", "pool", "torch")
SHARES_CORES: Final = {"OMP_WAIT_POLICY": "passive"}  # threads that wait leave them to others
DEFAULT: Final = "default"
EVERYTHING: Final = "everything"


def gpt2(sizes: text.Sizes, train: bool) -> Built:
    """Told which loss it is, or a warning splits the graph, and a step has two peaks."""
    module, inputs = text.gpt2(sizes, train)
    module.get_submodule("model").loss_type = "ForCausalLM"
    return Built(module, inputs)


MODELS: Final[dict[str, Builder]] = {
    "gpt2": partial(gpt2, replace(GPT2, layers=4)),
    "vit": partial(vit.vit, replace(VIT, layers=4)),
    "resnet50": partial(
        convolutional.resnet50, convolutional.Sizes(batch=4, image=224, classes=1000)
    ),
    "llama4": partial(text.llama, LLAMA),
}
TINY: Final[dict[str, Builder]] = {
    name: partial(gpt2, text.TINY) if name == "gpt2" else TABLE[name].tiny for name in MODELS
}
ONE_MODEL: Final = "import typer; from benchmarks.budgets import one_model; typer.run(one_model)"
ONE_TIMES: Final = "import typer; from benchmarks.budgets import one_times; typer.run(one_times)"


@dataclass(frozen=True, slots=True)
class Point:
    """A step at one budget: bytes beyond parameters and inputs, by place, and its gradients."""

    budget: float
    predicted: dict[str, int]
    measured: dict[str, int]
    from_first: float  # difference of the gradients from those at the first budget
    from_eager: float
    error: str | None = None  # what came instead of all that

    @property
    def peak(self) -> int:
        """Bytes that the step held."""
        return sum(self.measured.values())

    @property
    def foreseen(self) -> int:
        """Bytes that it was said to hold."""
        return sum(self.predicted.values())

    @property
    def off(self) -> float:
        """How far the peak is above what was foreseen, as a share; below: negative."""
        return self.peak / self.foreseen - 1

    @property
    def place(self) -> str:
        """Where the two differ most."""
        return max(PLACES, key=lambda place: abs(self.measured[place] - self.predicted[place]))


@dataclass(frozen=True, slots=True)
class Curve:
    """A model along falling budgets."""

    model: str
    parameters: int  # bytes
    tolerance: float  # of its gradients
    points: list[Point]
    error: str | None = None  # what became of the process

    @property
    def taken(self) -> list[Point]:
        """Those that were measured."""
        return [point for point in self.points if point.error is None]

    @property
    def worst(self) -> Point:
        """The one that is farthest from what was foreseen."""
        return max(self.taken, key=lambda point: abs(point.off))

    @property
    def rise(self) -> tuple[float, float]:
        """By how much a peak is above the least at larger budgets, at most, and at which budget."""
        least, found = self.taken[0].peak, (0.0, self.taken[0].budget)
        for point in self.taken:
            found = max(found, (point.peak / least - 1, point.budget))
            least = min(least, point.peak)
        return found

    def broken(self) -> Iterator[str]:
        """Which promises do not hold, in words."""
        failed = len(self.points) - len(self.taken)
        if failed:
            yield f"{failed} budgets failed"
        far = [point for point in self.taken if abs(point.off) > CLOSE]
        if far:
            yield f"{len(far)} peaks not as foreseen, worst in {self.worst.place}"
        if self.rise[0] > LEVEL:
            yield f"peak rises at {self.rise[1]:g}"
        differ = [one for one in self.taken if not one.from_first <= self.tolerance]
        if differ:
            yield f"{len(differ)} gradients differ"


def built(model: str, tiny: bool) -> Task:
    """A model's training step."""
    torch.manual_seed(SEED)
    return training((TINY if tiny else MODELS)[model], TABLE[model].tolerance)


def compiled(task: Task, options: Mapping[str, Any]) -> Program:
    """The step's program, whole: what a graph is foreseen to hold is then what a step is."""
    program: Program = torch.compile(
        task.program, backend="stator", fullgraph=True, options={**STATOR_OPTIONS, **options}
    )
    return program


def gradients(task: Task, program: Program) -> list[Tensor]:
    """Loss and gradients of a step, copied: the pool has nothing of them to count."""
    found = [one.detach().clone() for one in task.results(task.step(program))]
    for leaf in task.leaves:
        leaf.grad = None
    return found


def allocated(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had handed out at once during a call."""
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def held_at(task: Task, program: Program) -> dict[str, int]:
    """Bytes that a step holds, by place; each keeps what it once had."""
    import stator

    gc.collect()
    stator.trim()
    by_torch = allocated(partial(step, task, program))
    ours = stator.memory()
    return {"arena": ours.arenas, "pool": ours.peak, "torch": by_torch}


def foreseen(record: Any) -> dict[str, int]:
    """What a compilation said that a step would hold: the parts of `Compilation.step_peak`."""
    before, after = record.held["forward"], record.held["backward"]
    parts = {
        "arena": max(before.arena, after.arena),
        "pool": max(before.pool, after.pool + record.outputs),
        "torch": max(before.torch, after.torch),
    }
    whole = record.step_peak - record.inputs
    assert sum(parts.values()) == whole, f"a step's peak is {whole}, not the sum of {parts}"
    return parts


def measured(task: Task, budget: float, first: list[Tensor], eager: list[Tensor]) -> Point:
    """One budget, after a step that compiles and one that settles; `first` is filled by it."""
    import stator

    torch._dynamo.reset()
    program = compiled(task, {"memory_budget": budget})
    step(task, program)
    record = stator.last_compilation()
    found = gradients(task, program)
    first.extend(found if not first else [])
    from_first, from_eager = task.error(first, found), task.error(eager, found)
    del found
    return Point(budget, foreseen(record), held_at(task, program), from_first, from_eager)


def measure(model: str, budgets: Sequence[float], tiny: bool) -> Curve:
    """A model at every budget, in this process."""
    task = built(model, tiny)
    eager, first = gradients(task, task.program), list[Tensor]()
    points = []
    for budget in budgets:
        print(f"budget {budget:g}", flush=True)  # what the log ends with, if the process dies here
        try:
            points.append(measured(task, budget, first, eager))
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_LENGTH]
            points.append(Point(budget, {}, {}, 0, 0, said))
    return Curve(model, sum(leaf.nbytes for leaf in task.leaves), task.tolerance, points)


def save(_: torch.fx.Node) -> str:
    """The policy to save everything."""
    return "save"


def timed(task: Task, budget: Budget) -> Times:
    """Steps at the default and with everything saved, in turn."""
    series: dict[str, Series] = {}
    errors: dict[str, str] = {}
    eager = gradients(task, task.program)
    options: dict[str, dict[str, Any]] = {DEFAULT: {}, EVERYTHING: {"save_policy": save}}
    for name, chosen in options.items():
        program = compiled(task, chosen)
        error = task.error(eager, gradients(task, program))
        if error <= task.tolerance:
            series[name] = Series(partial(step, task, program))
        else:
            errors[name] = f"wrong by {error:.1e} of eager's result"
    foreign = interleave(list(series.values()), budget)
    return Times({name: one.seconds for name, one in series.items()}, foreign, errors)


def one_model(
    model: str,
    file: Path,
    every: Annotated[int, typer.Option()] = 1,
    tiny: Annotated[bool, typer.Option()] = False,
) -> None:
    """Measure a model in this process and store it."""
    torch.set_num_threads(THREADS)
    file.write_text(json.dumps(asdict(measure(model, BUDGETS[::every], tiny))), encoding="utf-8")


def one_times(
    model: str,
    file: Path,
    rounds: Annotated[int, typer.Option()] = 20,
    tiny: Annotated[bool, typer.Option()] = False,
) -> None:
    """Time a model in this process and store it."""
    os.environ.pop("GLIBC_TUNABLES", None)  # read when the process began
    torch.set_num_threads(THREADS)
    found = timed(built(model, tiny), Budget(rounds, MOST_SECONDS))
    file.write_text(json.dumps(asdict(found)), encoding="utf-8")


def curve_of(model: str, options: Sequence[str]) -> Curve:
    """A model's curve, from a process of its own."""
    try:
        stored = json.loads(left_by(ONE_MODEL, [model], options, {**os.environ, **SHARES_CORES}))
    except DiedError as error:
        return Curve(model, 0, 0, [], str(error))
    points = [Point(**point) for point in stored.pop("points")]
    return Curve(**stored, points=points)


def times_of(model: str, options: Sequence[str]) -> Times:
    """A model's times, from a process of its own."""
    try:
        stored = left_by(ONE_TIMES, [model], options, {**os.environ, **KEEPS_PAGES})
    except DiedError as error:
        return Times(errors={"": str(error)})
    return Times(**json.loads(stored))


def in_mebibytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / MEBIBYTE:.1f}"


def difference(values: Sequence[float]) -> str:
    """The largest."""
    return f"{max(values):.1g}"


def line(curve: Curve) -> list[str]:
    """A model in the table of promises."""
    if not curve.taken:
        return [curve.model, *[NOTHING] * 7, "**not measured**"]
    peaks = [point.peak for point in curve.taken]
    verdict = "; ".join(curve.broken())
    return [
        curve.model,
        in_mebibytes(curve.parameters),
        in_mebibytes(min(peaks)),
        in_mebibytes(max(peaks)),
        f"{curve.worst.off:+.1%} at {curve.worst.budget:g}",
        f"{curve.rise[0]:.1%}",
        difference([point.from_first for point in curve.taken]),
        difference([point.from_eager for point in curve.taken]),
        f"**{verdict}**" if verdict else "kept",
    ]


def by_budget(curves: Sequence[Curve]) -> str:
    """Peaks, measured and foreseen, a row for each budget."""
    budgets = sorted({point.budget for curve in curves for point in curve.points}, reverse=True)
    found = {(curve.model, point.budget): point for curve in curves for point in curve.taken}

    def cell(curve: Curve, budget: float) -> str:
        point = found.get((curve.model, budget))
        if point is None:
            return NOTHING
        both = f"{in_mebibytes(point.peak)} / {in_mebibytes(point.foreseen)}"
        return f"**{both}**" if abs(point.off) > CLOSE else both

    headings = ["budget", *(curve.model for curve in curves)]
    return markdown_table(
        headings, [[f"{budget:g}", *(cell(one, budget) for one in curves)] for budget in budgets]
    )


def report(curves: Sequence[Curve]) -> str:
    """The section of peaks in RESULTS.md."""
    count = max(len(curve.points) for curve in curves)
    legend = (
        f"Training steps at {count} budgets from 1 to 0, in MiB beyond parameters and inputs:"
        " bytes that torch's allocator, our pool and our arenas had in use, each at its highest."
        " *off* is the measured peak against what the compiler had said of it, where it is worst;"
        " *rise* how far a peak is above one at a larger budget; gradients are compared by norms,"
        " with those at budget 1 and with eager's (0 is equal in every bit; an untrained ResNet-50"
        " magnifies roundings). The promise, in bold where broken: within"
        f" {CLOSE:.0%}, no rise, equal gradients. {conditions()}."
    )
    headings = ["model", "parameters", "least peak", "largest peak", "off", "rise"]
    headings += ["gradients from budget 1", "from eager", "promise"]
    errors = [(curve.model, curve.error) for curve in curves]
    errors += [
        (f"{curve.model} at {point.budget:g}", point.error)
        for curve in curves
        for point in curve.points
    ]
    parts = [
        legend,
        markdown_table(headings, [line(curve) for curve in curves]),
        "Measured / foreseen, bold where they differ by more than that:",
        by_budget(curves),
        "\n".join(f"- {where}: {without_folders(said)}" for where, said in errors if said),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def times_line(model: str, times: Times) -> list[str]:
    """A model in the table of times."""
    default, everything = (times.seconds.get(name) for name in (DEFAULT, EVERYTHING))
    if not default or not everything:
        return [model, *[NOTHING] * 4, "**not measured**"]
    ratio = Spread.of_ratios(default, everything)
    both = [f"{Spread.of([1e3 * one for one in seconds]):.0f}" for seconds in (default, everything)]
    # Slower if three rounds of four say so: a median alone is off by chance.
    verdict = "**slower**" if ratio.low > 1 else "kept"
    return [model, *both, f"{ratio:.3f}", number(times.foreign, ".0%"), verdict]


def times_report(found: Mapping[str, Times]) -> str:
    """The section of times in RESULTS.md."""
    legend = (
        "The same steps without a budget, and with a policy that saves everything, called in turn:"
        " medians and quartiles. The promise: never slower, that is, the ratio's lower quartile is"
        f" not above 1. {conditions()}."
    )
    headings = ["model", "default, ms", "everything saved, ms", "ratio", "foreign", "promise"]
    errors = [
        f"- {model}{', ' if name else ''}{name}: {without_folders(error)}"
        for model, times in found.items()
        for name, error in times.errors.items()
    ]
    table = markdown_table(headings, [times_line(*one) for one in found.items()])
    return "\n\n".join(part for part in (legend, table, "\n".join(errors)) if part) + "\n"


def main(
    only: Annotated[str, typer.Option(help="One model.")] = "",
    peaks: Annotated[bool, typer.Option(help="Measure memory along budgets.")] = True,
    times: Annotated[bool, typer.Option(help="Time the default; wants a quiet machine.")] = False,
    rounds: Annotated[int, typer.Option(help="Timed steps of each, in turn.")] = 20,
    tiny: Annotated[bool, typer.Option(help="Small models, few budgets, to try it out.")] = False,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print tables and write them down."""
    if only and only not in MODELS:
        raise typer.BadParameter(f"there are: {', '.join(MODELS)}", param_hint="--only")
    torch.set_num_threads(THREADS)
    names, small = [only] if only else list(MODELS), ["--tiny"] if tiny else []
    sections = {}
    if peaks:
        take = partial(curve_of, options=["--every=10", *small] if tiny else [])
        with ThreadPoolExecutor(AT_ONCE) as pool:
            curves = list(track(pool.map(take, names), "peaks", total=len(names)))
        sections["budgets"] = report(curves)
    if times:
        options = [f"--rounds={rounds}", *small]
        found = {name: times_of(name, options) for name in track(names, "times")}
        sections["budget_times"] = times_report(found)
    for name, found_text in sections.items():
        print(found_text)
        if write and not tiny and not only:
            write_section(name, found_text)


if __name__ == "__main__":
    typer.run(main)
