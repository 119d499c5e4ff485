"""Fused kernels beside eager and Inductor, interleaved in one process.

Speed is over eager (above 1 is faster), the median of rounds with its quartiles; `floor` is the
time of the bytes that must move (each input read once, each output written once) at the speed of a
plain copy measured in the same run.  Cold seconds are the first call, Dynamo included.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.results import conditions, markdown_table, write_section

PEER: Final = "inductor"


@dataclass(frozen=True, slots=True)
class Row:
    """One program and its inputs."""

    name: str
    program: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def rows() -> list[Row]:
    """Kernels whose operators have rules today."""
    x, w = torch.randn(4096, 1024), torch.randn(1024)
    wide, bias = torch.randn(2048, 3072), torch.randn(3072)
    gate, up = torch.randn(2048, 2816), torch.randn(2048, 2816)
    tall = torch.randn(8192, 4096)
    cube, other = torch.randn(16, 512, 768), torch.randn(16, 768, 512)
    return [
        Row("softmax", lambda x: torch.softmax(x, -1), (x,)),
        Row("log_softmax", lambda x: torch.log_softmax(x, -1), (x,)),
        Row("layernorm", lambda x, w: F.layer_norm(x, (1024,), w, w), (x, w)),
        Row("rmsnorm", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6) * w, (x, w)),
        Row("bias_gelu", lambda x, b: F.gelu(x + b), (wide, bias)),
        Row("swiglu", lambda a, b: F.silu(a) * b, (gate, up)),
        Row("sum_outer", lambda x: x.sum(0), (tall,)),
        Row("permute_add", lambda x, y: x.permute(0, 2, 1) + y, (cube, other)),
    ]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _copy_rate() -> float:
    """Bytes a second of a copy into warm memory of 16 MiB, read and written."""
    source, target = torch.randn(1 << 22), torch.empty(1 << 22)
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(30))
    return float(2 * source.nbytes / best)


def _moved(row: Row) -> int:
    return int(sum(t.nbytes for t in row.inputs) + row.program(*row.inputs).nbytes)


def _measure(
    row: Row, backends: list[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    calls: dict[str, Callable[..., Tensor]] = {"eager": row.program}
    cold = {}
    for backend in backends:
        torch.compiler.reset()
        options = {"kernels": True} if backend == "stator" else None
        calls[backend] = torch.compile(row.program, backend=backend, dynamic=False, options=options)
        cold[backend] = _seconds(partial(calls[backend], *row.inputs))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_seconds(partial(call, *row.inputs)))
    return times, cold


def _ratio(times: dict[str, list[float]], name: str) -> str:
    ratios = [a / b for a, b in zip(times["eager"], times[name], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def main(
    rounds: Annotated[int, typer.Option(help="calls of each contender, in turn")] = 60,
    write: Annotated[bool, typer.Option(help="write RESULTS.md")] = True,
) -> None:
    """Measure every row; print the table and write it down."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # cold means cold
    backends = ["stator", *([PEER] if shutil.which("g++") else [])]
    rate = _copy_rate()
    table = []
    with torch.no_grad():
        for row in track(rows(), description="kernels"):
            times, cold = _measure(row, backends, rounds)
            floor = _moved(row) / rate
            ours = statistics.median(times["stator"])
            cells = [row.name, *(_ratio(times, name) for name in backends)]
            cells += [f"{1e3 * ours:.2f}", f"{ours / floor:.1f}"]
            table.append([*cells, *(f"{cold[name]:.2f}" for name in backends)])
    headings = [
        "kernel",
        *(f"{name} over eager" for name in backends),
        "stator ms",
        "over the floor",
    ]
    body = markdown_table([*headings, *(f"{name} cold s" for name in backends)], table)
    note = f"Copy: {rate / 1e9:.0f} GB/s. {conditions()}; {rounds} rounds, median (quartiles)."
    Console().print(f"{body}\n\n{note}", markup=False)
    if write:
        write_section("micro", f"{body}\n\n{note}")


if __name__ == "__main__":
    typer.run(main)
