"""Every row beside eager and Inductor: `python -m benchmarks.run`, or `make bench`.

Rows run one after the other, each in a process of its own (row.py), and are stored in .bench/ as
they come; tables are written from there (report.py), so a single row can be measured again.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.alone import ROOT, DiedError, run_alone
from benchmarks.case import Case
from benchmarks.cases import KINDS, cases
from benchmarks.machine import KEEPS_PAGES, THREADS, has_compiler
from benchmarks.record import Row, load, store
from benchmarks.report import TITLES, compiler_names, section, speed_cell
from benchmarks.results import conditions, write_section

STORE: Final = ROOT / ".bench"
TRIALS: Final = STORE / "trials"  # rows that no table is to show


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are measured."""

    rounds: int
    seconds: float
    peer: bool
    folder: Path


def chosen(kind: str, only: str) -> list[Case]:
    """The rows that the command line names."""
    if kind not in (*KINDS, "all"):
        raise typer.BadParameter(f"there are: {', '.join(KINDS)}, all", param_hint="--kind")
    found = cases(KINDS if kind == "all" else [kind])
    names = {name for name in only.split(",") if name}
    if unknown := names - {case.name for case in found}:
        raise typer.BadParameter(f"no row is called {', '.join(unknown)}", param_hint="--only")
    return [case for case in found if not names or case.name in names]


def stored_at(folder: Path, case: Case) -> Path:
    """Where a row is kept."""
    return folder / f"{case.kind}-{case.name}.json"


def failed(case: Case, why: str) -> Row:
    """A row of which nothing came back."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Row(case.name, case.kind, conditions(), day, error=why)


def measured(case: Case, settings: Settings, probes: str) -> Row:
    """Run one row in a process of its own; what it says goes to a log beside its figures."""
    file = stored_at(settings.folder, case)
    file.unlink(missing_ok=True)
    command = ["-m", "benchmarks.row", case.kind, case.name, str(file)]
    command += [f"--rounds={settings.rounds}", f"--seconds={settings.seconds}"]
    command += ["--peer" if settings.peer else "--no-peer"]
    # Compiler probes take a first process 20 seconds; the others find them here.
    environment = {**os.environ, **KEEPS_PAGES, "TORCHINDUCTOR_CACHE_DIR": probes}
    log = file.with_suffix(".log")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_alone(command, environment, log)
        row = load(file)
    except DiedError as error:
        row = failed(case, str(error))
    store(row, file)
    return row


def measure_all(rows: Sequence[Case], settings: Settings) -> Iterator[Row]:
    """One row after the other, with a bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # A bar that is drawn seldom disturbs little.
    bar = Progress(*columns, TimeElapsedColumn(), refresh_per_second=1)
    with bar, tempfile.TemporaryDirectory() as probes:
        task = bar.add_task("", total=len(rows))
        for case in rows:
            bar.update(task, description=f"{case.kind:5} {case.name:20}")
            row = measured(case, settings, probes)
            bar.console.print(summary(row), markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)
            yield row


def summary(row: Row) -> str:
    """One line for the screen."""
    cells = [f"{TITLES[name]} {speed_cell(row, name)}" for name in compiler_names([row])]
    said = [row.error or "", *(f"{n}: {o.error}" for n, o in row.outcomes.items() if o.error)]
    return "  ".join([f"{row.kind:5} {row.name:20}", *cells, *filter(None, said)])


def tabled(kind: str, fresh: Sequence[Row]) -> list[Row]:
    """The rows of a table: those just measured, and of the others what an earlier run stored."""
    measured_now = {row.name: row for row in fresh if row.kind == kind}
    rows = []
    for case in cases([kind]):
        file = stored_at(STORE, case)
        if case.name in measured_now:
            rows.append(measured_now[case.name])
        elif file.exists() and (row := load(file)).conditions == conditions():
            rows.append(row)
    return rows


def main(
    only: Annotated[str, typer.Option(help="Names of rows, with commas.")] = "",
    kind: Annotated[str, typer.Option(help="micro, infer, train or all.")] = "all",
    rounds: Annotated[int, typer.Option(help="Calls of each contender, in turn.")] = 20,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 12,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
    peer: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
) -> None:
    """Measure rows, print their tables and write them down."""
    torch.set_num_threads(THREADS)  # conditions() says how many
    folder = STORE if write else TRIALS
    settings = Settings(rounds, seconds, peer and has_compiler(), folder)
    fresh = list(measure_all(chosen(kind, only), settings))
    for name in KINDS:
        new = [row for row in fresh if row.kind == name]
        if not new:
            continue
        typer.echo(f"\n{section(new, name)}")
        if write:
            write_section(name, section(tabled(name, new), name))


if __name__ == "__main__":
    typer.run(main)
