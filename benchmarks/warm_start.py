"""How long a new process takes until a model first runs, with nothing cached and with all of it.

`python -m benchmarks.warm_start`, or `make bench`.  Every start is a process of its own: it imports
torch, builds the model and makes the first compiled call, which is timed in parts:

    Dynamo     tracing and guards: what Dynamo says it took, less the backend
    backend    importing the backend, compiling or loading the forward, and the backward's share:
               what the first backward takes longer than the second
    first run  the rest of the call

The first process of a contender finds an empty cache (cold), those after it what that one left
(warm); warm processes of all contenders run in turn.  Importing torch and Dynamo, transformers and
the model's weights are nobody's part.  Nor is what a machine does once: our modules are compiled to
bytecode, as an installed package is, and each process touches memory and gives it back before it
begins, since a virtual machine that never used a page takes ten times as long to come by it.
"""

from __future__ import annotations

import compileall
import importlib
import json
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final
from unittest import mock

import torch
import typer
from rich.progress import track
from torch._dynamo.utils import compilation_time_metrics, counters

from benchmarks.alone import ROOT, DiedError, left_by
from benchmarks.case import Kind, Program, Task
from benchmarks.cases import find
from benchmarks.contenders import Watch
from benchmarks.machine import THREADS, CpuReading, foreign_share, has_compiler, read_cpu
from benchmarks.record import INDUCTOR, STATOR
from benchmarks.report import NOTHING, TITLES, number, without_folders
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import ERROR_LENGTH, SEED, seconds_of
from benchmarks.spread import Spread

MODELS: Final[dict[str, tuple[Kind, str]]] = {
    "BERT-base": ("infer", "bert"),
    "GPT-2, training": ("train", "gpt2"),
    "ResNet-50": ("infer", "resnet50"),
}
MODULES: Final = {STATOR: "stator.backend", INDUCTOR: "torch._inductor.compile_fx"}
FOLDERS: Final = {STATOR: "STATOR_CACHE_DIR", INDUCTOR: "TORCHINDUCTOR_CACHE_DIR"}
# What users may have set that would make a cache another than the default one.
SETTINGS: Final = (
    "STATOR_CACHE",
    "STATOR_REMOTE_CACHE",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
)
WHOLE_FRAME: Final = "_compile.compile_inner"  # Dynamo's name for all it does, backend included
TOUCHED: Final = 1 << 30  # bytes, about what a training step of GPT-2 takes
ONE_START: Final = "import typer; from benchmarks.warm_start import one_start; typer.run(one_start)"


@dataclass(frozen=True, slots=True)
class Start:
    """One process; times in seconds."""

    error: str | None = None  # why there is nothing below
    importing: float = 0.0  # the backend's modules
    dynamo: float = 0.0
    backend: float = 0.0  # `importing` included
    first_run: float = 0.0
    process: float = 0.0  # from its beginning to its end, seen from outside
    graphs: int = 0  # that the backend was given
    cache: str = ""  # what the compiler says of its cache


@contextmanager
def watched(name: str, program: Program, watch: Watch) -> Iterator[Program]:
    """`program` as a contender compiles it at the first call, its cache as it is by default."""
    module = importlib.import_module(MODULES[name])
    backend = watch.around(module.compile_fx)
    if name == STATOR:  # strict: a fallback to eager would pass for a quick start
        yield torch.compile(program, backend=backend, options={"strict": True})
    else:  # by its name, as users have it: torch.compile looks the function up when it is needed
        with mock.patch.object(module, "compile_fx", backend):
            yield torch.compile(program, backend=name)


def said_of_cache(name: str) -> str:
    """Whether compiled programs were found, in the compiler's own words."""
    if name == INDUCTOR:
        names = {"autograd_cache_hit": "aot_autograd", "fxgraph_cache_hit": "inductor"}
        hits = sum(counters[group][counter] for counter, group in names.items())
        return "hit" if hits else "miss"
    import stator  # here, where it is imported anyway

    return str(getattr(stator.last_compilation(), "cache", None) or "")


def touch_memory() -> None:
    """Have the machine come by memory, large pages too, and give it back to the system."""
    with mmap.mmap(-1, TOUCHED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for first in range(0, TOUCHED, mmap.PAGESIZE):
            memory[first] = 1


def start(name: str, task: Task) -> Start:
    """The first call of a contender in this process, in its parts; checked against eager."""
    touch_memory()
    importing = seconds_of(lambda: importlib.import_module(MODULES[name]))
    compilation_time_metrics.clear()
    watch = Watch()
    with watched(name, task.program, watch) as program:
        begin = time.perf_counter()
        output = task.forward(program)
        first_backward = seconds_of(lambda: task.backward(output))
        whole = time.perf_counter() - begin
    results = task.results(output)
    output = task.forward(program)
    again = seconds_of(lambda: task.backward(output))
    dynamo = max(0.0, sum(compilation_time_metrics.get(WHOLE_FRAME, ())) - watch.seconds)
    backend = watch.seconds + max(0.0, first_backward - again)
    error = task.error(task.results(task.step(task.program)), results)
    return Start(
        error=None if error <= task.tolerance else f"wrong by {error:.1e} of eager's result",
        importing=importing,
        dynamo=dynamo,
        backend=importing + backend,
        first_run=max(0.0, whole - dynamo - backend),
        graphs=watch.graphs,
        cache=said_of_cache(name),
    )


def one_start(
    model: str,
    name: str,
    file: Path,
    tiny: Annotated[bool, typer.Option()] = False,
) -> None:
    """Start one contender in this process and store what it took."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    case = find(*MODELS[model])
    task = case.tiny() if tiny else case.full()
    try:
        found = start(name, task)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        found = Start(error=said[:ERROR_LENGTH])
    file.write_text(json.dumps(asdict(found)), encoding="utf-8")


def in_a_process(model: str, name: str, cache: Path, tiny: bool) -> Start:
    """One start with that cache folder; what went wrong otherwise."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    environment[FOLDERS[name]] = str(cache)
    begin = time.perf_counter()
    try:
        text = left_by(ONE_START, [model, name], ["--tiny"] if tiny else [], environment)
    except DiedError as error:
        return Start(error=str(error))
    return replace(from_text(text), process=time.perf_counter() - begin)


def from_text(text: str) -> Start:
    """A start as its process stored it."""
    stored: dict[str, Any] = json.loads(text)
    return Start(**stored)


@dataclass(frozen=True, slots=True)
class Row:
    """One model with one contender: the cold start, then the warm ones."""

    model: str
    name: str
    cold: Start
    warm: tuple[Start, ...]

    @property
    def error(self) -> str | None:
        """What went wrong first."""
        return next((one.error for one in (self.cold, *self.warm) if one.error), None)

    def warm_ms(self, part: str) -> list[float]:
        """A part of the warm starts in milliseconds, round by round."""
        return [1e3 * getattr(one, part) for one in self.warm]


def measure(model: str, names: Sequence[str], warm: int, tiny: bool) -> list[Row]:
    """All starts of one model: each contender cold, then all of them warm in turn."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder, name) for name in names}
        cold = {name: in_a_process(model, name, caches[name], tiny) for name in names}
        rounds = [
            {name: in_a_process(model, name, caches[name], tiny) for name in names}
            for _ in range(warm)
        ]
    return [Row(model, name, cold[name], tuple(one[name] for one in rounds)) for name in names]


def read_all_cpu() -> CpuReading:
    """The clocks now, those of processes that were started and ended counted as our own."""
    reading = read_cpu()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return replace(reading, own=reading.own + usage.ru_utime + usage.ru_stime)


PARTS: Final = {"dynamo": "Dynamo", "backend": "backend", "first_run": "first run"}


def line(row: Row, peer: Row | None) -> list[str]:
    """One row of the table."""
    head = [row.model, TITLES[row.name]]
    if row.error:
        return [*head, "error", *[NOTHING] * (2 * len(PARTS) + 2)]
    share = NOTHING
    if row.name != INDUCTOR and peer is not None and not peer.error:
        share = f"{Spread.of_ratios(row.warm_ms('backend'), peer.warm_ms('backend')):.3f}"
    return [
        *head,
        *(f"{1e3 * getattr(row.cold, part):.0f}" for part in PARTS),
        *(f"{Spread.of(row.warm_ms(part)):.0f}" for part in PARTS),
        f"{Spread.of(row.warm_ms('importing')):.0f}",
        share,
        f"{Spread.of(row.warm_ms('process')):.0f}",
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What went wrong, and warm starts that found nothing, a line each."""
    lines = []
    for row in rows:
        said = f"- {row.model}, {TITLES[row.name]}:"
        missed = {one.cache or "unknown" for one in row.warm if one.cache != "hit"}
        if row.error:
            lines.append(f"{said} {without_folders(row.error)}")
        elif not row.cold.graphs:
            lines.append(f"{said} Dynamo captured nothing, eager ran")
        elif missed:
            lines.append(f"{said} a warm start found no program, cache: {', '.join(missed)}")
    return lines


def report(rows: Sequence[Row], foreign: float | None) -> str:
    """The section of RESULTS.md."""
    headings = [
        "model",
        "contender",
        *(f"cold: {title}" for title in PARTS.values()),
        *(f"warm: {title}" for title in PARTS.values()),
        "of it importing",
        "of Inductor's",
        "process",
    ]
    peers = {row.model: row for row in rows if row.name == INDUCTOR}
    lines = [line(row, peers.get(row.model)) for row in rows]
    legend = (
        "The first compiled call of a model in a new process, in milliseconds. *cold*: nothing is"
        " cached, one process; Inductor's probes of its compiler are part of that. *warm*: with"
        " what the cold start left, median and quartiles of processes that ran in turn. *backend*"
        " is all that comes after Dynamo, importing the compiler included, forward and backward;"
        " *of Inductor's* is the ratio of the warm ones; *process* is from beginning to end, a"
        " second call and one of eager's included. The aim: BERT-base under 100 ms warm, and at"
        " most a twentieth of Inductor's. Measured by `make bench`."
    )
    warm = max((len(row.warm) for row in rows), default=0)
    note = (
        f"Warm starts: {warm}; others used {number(foreign, '.0%')} of the cores. {conditions()}."
    )
    parts = [legend, markdown_table(headings, lines), note, "\n".join(remarks(rows))]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(
    warm: Annotated[int, typer.Option(help="Warm starts of each contender.")] = 7,
    only: Annotated[str, typer.Option(help="A model: bert, gpt2 or resnet50.")] = "",
    peer: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
    tiny: Annotated[bool, typer.Option(help="Small models, to try it out.")] = False,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Start processes, print a table and write it down."""
    torch.set_num_threads(THREADS)  # conditions() says how many
    chosen = [model for model, (_, name) in MODELS.items() if only in ("", name)]
    if not chosen:
        known = ", ".join(name for _, name in MODELS.values())
        raise typer.BadParameter(f"there are: {known}", param_hint="--only")
    names = [STATOR, *([INDUCTOR] if peer and has_compiler() else [])]
    compileall.compile_dir(ROOT / "src" / "stator", quiet=1)
    begin = read_all_cpu()
    rows = [row for model in track(chosen) for row in measure(model, names, warm, tiny)]
    text = report(rows, foreign_share(begin, read_all_cpu(), os.cpu_count() or 1))
    print(text)
    if write and not tiny and not only:
        write_section("warm_start", text)


if __name__ == "__main__":
    typer.run(main)
