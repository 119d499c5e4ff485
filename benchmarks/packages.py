"""Packages beside AOTInductor's: `python -m benchmarks.packages`.

The same exported program is built by both.  Loading is timed in processes of their own; calls are
in one process, in turn.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import Progress
from torch import nn

import stator
from benchmarks.alone import run_alone
from benchmarks.closeness import TOLERANCE, relative_error
from benchmarks.machine import THREADS
from benchmarks.models import convolutional, text
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.spread import Spread

BUILDS: Final = {"stator": "stator", "AOTInductor": "aoti"}
CALLS: Final = 12  # of a model, each round


class Small(nn.Module):
    """Two products: what a call costs beside its work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return torch.softmax(self.second(nn.functional.gelu(self.first(x))), -1)


def _small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Small(), (torch.randn(5, 8),)


MODELS: Final[Mapping[str, Callable[[], Any]]] = {
    "small": _small,
    "bert": lambda: text.bert(text.BERT_BASE, False),
    "resnet50": lambda: convolutional.resnet50(convolutional.FULL, False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One model, in seconds."""

    name: str
    builds: Mapping[str, float]
    loads: Mapping[str, Mapping[str, Sequence[float]]]  # by builder: what, in fresh processes
    calls: Mapping[str, Spread]


def build(program: Any, who: str, path: Path) -> float:
    """Build a package; how long it took."""
    start = time.perf_counter()
    if who == "stator":
        stator.aot_compile(program, options={"output_path": path})
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return time.perf_counter() - start


def load(who: str, path: str, **options: Any) -> Any:
    """A package as a callable."""
    if who == "stator":
        return stator.load(path, **options)
    return torch._inductor.aoti_load_package(path)


def time_loading(who: str, path: str, inputs: str, result: str) -> None:
    """In a process of its own: load, the first call, and the calls that follow."""
    torch.set_num_threads(THREADS)
    given = torch.load(inputs, weights_only=True)
    import_module("stator.package.load" if who == "stator" else "torch._inductor.package")
    seconds: dict[str, float] = {}
    if who == "stator":
        start = time.perf_counter()
        load(who, path, checks_weights=False)
        seconds["unchecked"] = time.perf_counter() - start
    start = time.perf_counter()
    model = load(who, path)
    seconds["load"] = time.perf_counter() - start
    with torch.no_grad():
        for name in ("first", "second", "third"):
            start = time.perf_counter()
            model(*given)
            seconds[name] = time.perf_counter() - start
    Path(result).write_text(json.dumps(seconds), encoding="utf-8")


def measure(name: str, folder: Path, rounds: int) -> Row:
    """Everything of one model."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model.eval()
    with torch.no_grad():
        program = torch.export.export(model, tuple(args))
        paths = {who: folder / f"{name}-{key}.pt2" for who, key in BUILDS.items()}
        builds = {who: build(program, who, path) for who, path in paths.items()}
        inputs = folder / f"{name}.pt"
        torch.save(tuple(args), inputs)
        loads = {who: _loads(who, path, inputs, rounds) for who, path in paths.items()}
        return Row(name, builds, loads, _calls(model, tuple(args), paths, rounds))


def _loads(who: str, path: Path, inputs: Path, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    result = inputs.with_suffix(".json")
    command = ["-m", "benchmarks.packages", "--loading", who, str(path), str(inputs), str(result)]
    for _ in range(rounds):
        run_alone(command, os.environ, inputs.with_suffix(".log"))
        for what, seconds in json.loads(result.read_text(encoding="utf-8")).items():
            found.setdefault(what, []).append(seconds)
    return found


def _calls(
    model: nn.Module, args: tuple[Any, ...], paths: Mapping[str, Path], rounds: int
) -> dict[str, Spread]:
    """Microseconds of a call, contenders in turn; results are compared with eager's."""
    contenders = {who: load(who, str(path)) for who, path in paths.items()}
    contenders["stator by torch's loader"] = load("AOTInductor", str(paths["stator"]))
    contenders["eager"] = model
    expected = model(*args)
    for who, call in contenders.items():
        error = relative_error(expected, call(*args))
        assert error <= TOLERANCE, f"{who} is wrong by {error:.1e}"
    count = CALLS if any(tensor.numel() > 100 for tensor in args) else 50 * CALLS
    times: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(max(rounds, 3)):
        for who, call in contenders.items():
            call(*args)
            start = time.perf_counter()
            for _ in range(count):
                call(*args)
            times[who].append(1e6 * (time.perf_counter() - start) / count)
    return {who: Spread.of(values) for who, values in times.items()}


TEXT: Final = """\
The same exported program, packaged by both and called on two threads. Building is in seconds, \
once, of a program that is exported already; ours has kernels for three levels of processors. \
Loading and the first calls are in ms, in fresh processes that have imported what loads them; \
*unchecked* leaves out reading all weights once for their digests. Calls are in µs, in turn, in \
one process. The aims: a tenth of the time to build, 50 ms to load, no more than AOTInductor's \
call. {conditions}"""
STEPS: Final = ("unchecked", "load", "first", "second", "third")


def report(rows: Sequence[Row], operators: Sequence[Sequence[str]]) -> str:
    """The tables."""
    built = [
        [
            row.name,
            *(f"{row.builds[who]:.2f}" for who in BUILDS),
            f"{row.builds['stator'] / row.builds['AOTInductor']:.3f}",
        ]
        for row in rows
    ]
    loaded = [[row.name, who, *_in_ms(row.loads[who])] for row in rows for who in BUILDS]
    called = [[row.name, *(f"{row.calls[who]:.1f}" for who in _names(rows))] for row in rows]
    tables = (
        TEXT.format(conditions=conditions()),
        markdown_table(["model", "stator, s", "AOTInductor, s", "of AOTInductor's"], built),
        markdown_table(
            ["model", "package of", "unchecked", "load", "first call", "second", "third"], loaded
        ),
        markdown_table(["model", *_names(rows)], called),
        "Operators of eager mode, in µs a call: torch's own, and kernels that are found by their "
        "arguments (`stator.eager_ops`), in turn.",
        markdown_table(["operator", "eager", "cached", "of eager's"], [*map(list, operators)]),
    )
    return "\n\n".join(tables) + "\n"


def _in_ms(times: Mapping[str, Sequence[float]]) -> list[str]:
    return [
        f"{Spread.of([1e3 * s for s in times[what]]):.1f}" if what in times else "–"
        for what in STEPS
    ]


def time_operators(folder: Path, rounds: int) -> list[list[str]]:
    """Eager operators, with and without kernels of their own."""
    small, large = torch.randn(64, 64), torch.randn(1024, 1024)
    programs: dict[str, Callable[[], Any]] = {
        "add.Tensor, 64 x 64": lambda: small + small,
        "add.Tensor, 1024 x 1024": lambda: large + large,
        "gelu, 1024 x 1024": lambda: nn.functional.gelu(large),
        "_softmax, 1024 x 1024": lambda: torch.softmax(large, -1),
        "native_layer_norm, 1024 x 1024": lambda: nn.functional.layer_norm(large, (1024,)),
    }
    names = ["add.Tensor", "gelu", "_softmax", "native_layer_norm"]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in programs}
    for _ in range(max(rounds, 3)):
        for which in range(2):
            if which:
                stator.eager_ops.enable("aten", names, options={"cache_dir": folder})
            for name, program in programs.items():
                times[name][which].append(_microseconds(program))
            stator.eager_ops.disable()
    return [
        [
            name,
            f"{Spread.of(eager):.1f}",
            f"{Spread.of(cached):.1f}",
            f"{Spread.of_ratios(cached, eager):.2f}",
        ]
        for name, (eager, cached) in times.items()
    ]


def _microseconds(program: Callable[[], Any]) -> float:
    with torch.no_grad():
        for _ in range(20):
            program()
        start = time.perf_counter()
        for _ in range(300):
            program()
        return 1e6 * (time.perf_counter() - start) / 300


def _names(rows: Sequence[Row]) -> list[str]:
    return list(rows[0].calls)


def main(
    rounds: Annotated[int, typer.Option(help="Fresh processes of each.")] = 5,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
    only: Annotated[str, typer.Option(help="Names of models.")] = ",".join(MODELS),
) -> None:
    """Measure, print the tables and write them down."""
    torch.set_num_threads(THREADS)
    chosen = only.split(",")
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        task = progress.add_task("packages", total=len(chosen))
        rows = []
        for name in chosen:
            rows.append(measure(name, Path(folder), rounds))
            progress.advance(task)
        body = report(rows, time_operators(Path(folder), rounds))
    print(body)
    if write:
        write_section("packages", body)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loading"]:
        time_loading(*sys.argv[2:])
    else:
        typer.run(main)
