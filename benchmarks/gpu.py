"""Stator on a GPU beside eager and Inductor: `python -m benchmarks.gpu`, or `make gpu-bench`.

Rows run in a process of their own, one after the other; where a row takes it down, or breaks the
device, the next begins in a fresh one.  What is measured is written to the file after every row,
the table comes last; `python -m benchmarks.gpu_report FILE …` makes RESULTS.md of it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.alone import ROOT
from benchmarks.gpu_cases import CASES, HOST, KERNELS, MODELS, ORDER
from benchmarks.gpu_clock import Clock, clock_of, copy_rate
from benchmarks.gpu_host import measure_host
from benchmarks.gpu_measure import Settings, first_use, in_words, measure
from benchmarks.gpu_record import EAGER, INDUCTOR, STATOR, GpuRow, GpuRun, merged, store
from benchmarks.gpu_report import progress_line, text_table

OUT: Final = ROOT / ".bench" / "gpu.json"
ROW_SECONDS: Final = 200.0  # the most that a row may take
DEADLINE: Final = 510.0  # seconds after which no row begins
SMALL_COPY: Final = 1 << 20  # bytes, where sizes are tiny
PACKAGES: Final = ("torch", "triton", "transformers", "llvmlite", "numpy")


@dataclass(frozen=True, slots=True)
class Hello:
    """A process's first word: on what it measures."""

    machine: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """A row, and whether the device still works."""

    row: GpuRow
    is_sound: bool


def machine_of(clock: Clock) -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "day": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            found[name] = importlib.import_module(name).__version__
    if clock.device.type == "cuda":
        properties = torch.cuda.get_device_properties(clock.device)
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
    return found


# ---------------------------------------------------------------------------------------------
# The process that measures


def measured_row(name: str, clock: Clock, settings: Settings, connection: Connection) -> GpuRow:
    """One row; what goes wrong with all of it is said in it."""
    begin = time.perf_counter()
    try:
        if name == HOST:
            row = measure_host(clock, settings, connection.send)
        else:
            row = measure(CASES[name], clock, settings, connection.send)
    except Exception as error:
        traceback.print_exc()
        row = failed(name, in_words(error))
    return replace(row, seconds=time.perf_counter() - begin)


def failed(name: str, why: str) -> GpuRow:
    """A row of which nothing came back."""
    if name == HOST:
        return GpuRow(HOST, "host", "", error=why)
    case = CASES[name]
    return GpuRow(name, case.kind, case.size, case.memory_bound, error=why)


def is_sound(clock: Clock) -> bool:
    """Whether the device does what it is told; after a fault in a kernel it no longer does."""
    try:
        gc.collect()
        clock.wait()
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(torch.ones(4, device=clock.device).sum() == 4)
    except RuntimeError:
        return False


def serve(connection: Connection, settings: Settings) -> None:
    """The life of a measuring process: rows by name, until it is hung up on."""
    clock = clock_of(settings.device)
    machine = machine_of(clock)
    copied = copy_rate(clock, SMALL_COPY) if settings.tiny else copy_rate(clock)
    machine["copy_gb_per_s"] = copied / 1e9
    for name in settings.contenders:
        if name != EAGER:
            connection.send(f"first use of {name}")
            try:
                machine[f"{name}_first_use_s"] = first_use(name, clock)
            except Exception as error:
                traceback.print_exc()
                machine[f"{name}_first_use_s"] = in_words(error)
    connection.send(Hello(machine))
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        row = replace(measured_row(name, clock, settings, connection), copy=copied)
        sound = is_sound(clock)
        connection.send(Done(row, sound))
        if not sound:
            return


# ---------------------------------------------------------------------------------------------
# The process that asks


class Measurer:
    """A measuring process, seen from outside; it is started when it is needed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.machine: dict[str, Any] = {}
        self._process: Any = None
        self._connection: Any = None
        self._phase = ""

    def row(self, name: str) -> GpuRow:
        """Measure a row; what a dead or silent process was at is the row's error."""
        try:
            if self._process is None:
                self._start()
            self._connection.send(name)
            done = self._hear(Done)
        except (EOFError, OSError, TimeoutError) as error:
            why = "took too long" if isinstance(error, TimeoutError) else "the process died"
            phase = self._phase
            self.stop()
            return failed(name, f"{why}: {phase}")
        if not done.is_sound:
            self.stop()
        row: GpuRow = done.row
        return row

    def stop(self) -> None:
        """End the process: by hanging up, or at once."""
        if self._process is None:
            return
        self._connection.close()
        self._process.join(timeout=5.0)
        self._process.kill()
        self._process.join()
        self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # No daemon: compilers have processes of their own.
        self._process = context.Process(target=serve, args=(theirs, self.settings))
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self._phase = "starting"
        self.machine |= self._hear(Hello).machine

    def _hear(self, kind: type) -> Any:
        """The next word of a kind; those that only say what begins are kept."""
        end = time.monotonic() + ROW_SECONDS
        while self._connection.poll(max(0.0, end - time.monotonic())):
            said = self._connection.recv()
            if isinstance(said, kind):
                return said
            self._phase = str(said)
        raise TimeoutError


def run(names: Sequence[str], settings: Settings, out: Path, deadline: float) -> GpuRun:
    """Measure rows, one after the other; the file has each as it comes."""
    begin = time.monotonic()
    measurer = Measurer(settings)
    found = GpuRun()
    try:
        for name in names:
            if time.monotonic() > begin + deadline:
                row = failed(name, f"not begun: {deadline:.0f} s were over")
            else:
                row = measurer.row(name)
            found = merged([found, GpuRun(dict(measurer.machine), [row])], ORDER)
            store(found, out)
            print(f"{time.monotonic() - begin:6.1f} s  {progress_line(row)}", flush=True)
    finally:
        measurer.stop()
    return found


def chosen_rows(only: str, kernels: bool, models: bool) -> list[str]:
    """The rows that the command line names; without any choice all."""
    wanted = [name for name in only.split(",") if name]
    if unknown := set(wanted) - set(ORDER):
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}; there are {ORDER}")
    if wanted:
        return [name for name in ORDER if name in wanted]
    if not kernels and not models:
        return list(ORDER)
    small = [HOST, *(case.name for case in KERNELS)] if kernels else []
    return small + ([case.name for case in MODELS] if models else [])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default="", help="names of rows, with commas")
    parser.add_argument("--kernels", action="store_true", help="the host row and the kernels")
    parser.add_argument("--models", action="store_true", help="the models")
    parser.add_argument("--out", type=Path, default=OUT, help="the file that is written")
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds, a row")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="no row begins after")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs take part in inference")
    parser.add_argument("--no-peer", action="store_true", help="without Inductor")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure rows; 0 if nothing failed."""
    chosen = parsed(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu --tiny tries the script itself")
        return 2
    settings = Settings(
        chosen.device,
        chosen.tiny,
        chosen.seconds,
        (EAGER, STATOR) if chosen.no_peer else (EAGER, INDUCTOR, STATOR),
        chosen.graphs,
    )
    names = chosen_rows(chosen.only, chosen.kernels, chosen.models)
    found = run(names, settings, chosen.out, chosen.deadline)
    print(f"\n{text_table(found)}", flush=True)
    bad = [row for row in found.rows if row.error or any(o.error for o in row.outcomes.values())]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
