"""Compile a small transformer for inference and for training, and compare both with eager.

Then show the plan of a memory-bound function with its peak, foreseen and measured, and start the
transformer once more in a new process, where the cache has its machine code.

Exits with 1 if an error is beyond its bound: twice eager's own error plus one ulp, both measured
against the same model in float64.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from torch import Tensor, nn

import stator
from stator.core.events import Compilation

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 4, 4, 2048
BATCH, LENGTH = 4, 64
ROUNDS, LEAST_ROUNDS, SECONDS = 25, 5, 8.0  # fewer rounds where time runs out

ULP: float = torch.finfo(torch.float32).eps


class Block(nn.Module):
    """Causal attention, then a feed-forward network, each behind a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))
        return x + self.network(self.network_norm(x))


class Decoder(nn.Module):
    """A language model: embedding, blocks, and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured for one use of the model, eager beside compiled."""

    use: str
    eager_ms: float
    compiled_ms: float
    speed: float
    eager_error: float
    compiled_error: float
    compile_seconds: float

    @property
    def bound(self) -> float:
        """The largest error that is accepted."""
        return 2 * self.eager_error + ULP

    @property
    def holds(self) -> bool:
        """Is the compiled model as accurate as promised?"""
        return self.compiled_error <= self.bound


def infer(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The logits, without gradients."""
    with torch.no_grad():
        return [model(ids)]


def train(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The loss of predicting each next token, and its gradient for every parameter."""
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def error(results: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """The largest deviation of any tensor, relative to that tensor's largest element."""
    pairs = zip(results, reference, strict=True)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)


def interleaved_ms(
    first: Callable[[], object], second: Callable[[], object], after_round: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, the two in turn, so that a slow moment falls on both."""
    times: tuple[list[float], list[float]] = ([], [])
    stop = time.perf_counter() + SECONDS
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() > stop:
            break
        for call, taken in zip((first, second), times, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begin))
        after_round()
    return times


def compare(
    use: str,
    step: Callable[[nn.Module, Tensor], list[Tensor]],
    program: tuple[nn.Module, Tensor],
    folder: str,
    progress: Progress,
) -> tuple[Comparison, Compilation]:
    """Run one use of the model in float64, in eager and compiled; measure all three."""
    model, ids = program
    task = progress.add_task(f"{use}: float64 reference", total=ROUNDS + 2)
    reference = step(copy.deepcopy(model).double(), ids)

    progress.update(task, advance=1, description=f"{use}: compiling")
    torch.compiler.reset()
    # Strict: a fallback to eager would look like success here.
    options = {"strict": True, "cache_dir": folder}
    compiled = torch.compile(model, backend="stator", fullgraph=True, options=options)
    compiled_error = error(step(compiled, ids), reference)
    compilation = last()
    eager_error = error(step(model, ids), reference)

    progress.update(task, advance=1, description=f"{use}: measuring")
    eager_ms, compiled_ms = interleaved_ms(
        lambda: step(model, ids), lambda: step(compiled, ids), lambda: progress.advance(task)
    )
    progress.update(task, completed=ROUNDS + 2, description=f"{use}: done")
    comparison = Comparison(
        use=use,
        eager_ms=statistics.median(eager_ms),
        compiled_ms=statistics.median(compiled_ms),
        # The median of ratios: each pair ran in the same moment.
        speed=statistics.median(e / c for e, c in zip(eager_ms, compiled_ms, strict=True)),
        eager_error=eager_error,
        compiled_error=compiled_error,
        compile_seconds=compilation.seconds,
    )
    return comparison, compilation


def speed_and_error(comparisons: Iterable[Comparison]) -> Table:
    """One row for each use."""
    table = Table(title="Speed and error (float64 is the reference)")
    table.add_column("use", no_wrap=True)
    for heading in ("eager ms", "stator ms", "speed", "eager error", "stator error", "bound"):
        table.add_column(heading, justify="right")
    for row in comparisons:
        colour = "green" if row.holds else "red"
        table.add_row(
            row.use,
            f"{row.eager_ms:.1f}",
            f"{row.compiled_ms:.1f}",
            f"{row.speed:.2f}×",
            f"{row.eager_error:.1e}",
            f"[{colour}]{row.compiled_error:.1e}",
            f"{row.bound:.1e} {'✓' if row.holds else '✗'}",
        )
    return table


def stages(use: str, compilation: Compilation) -> Table:
    """One row for each stage of a compilation."""
    table = Table(title=f"Stages, {use}: {compilation.seconds:.2f} s", min_width=50)
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("nodes", justify="right")
    for event in compilation.stages:
        nodes = f"{event.nodes_before} → {event.nodes_after}"
        table.add_row(event.name, f"{1e3 * event.seconds:.1f} ms", nodes)
    return table


def chain(x: Tensor) -> Tensor:
    """Bound by memory: the sum over columns keeps it from being one kernel."""
    y = F.gelu(x * 2 + 1)
    return y / (1 + y.square().sum(0))


def megabytes(field: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measured_peak(call: Callable[[], object]) -> float:
    """MiB that a call holds at most beyond what the process held before it."""
    stator.trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = megabytes("VmRSS")
    call()
    return megabytes("VmHWM") - before


def show_memory(console: Console) -> None:
    """The plan of a function on 64 MiB, and its peak."""
    x = torch.randn(4096, 4096)
    with torch.no_grad():
        explanation = stator.explain(chain, x)
        compiled = torch.compile(chain, backend="stator", options={"strict": True, "cache": False})
        compiled(x)
        predicted = (last().predicted_peak or 0) / 2**20
        console.print("\n[bold]The plan of a memory-bound function on 64 MiB")
        for plan in explanation.graphs[0].plans.values():
            console.print(plan, highlight=False)
        if Path("/proc/self/clear_refs").exists():
            measured = measured_peak(lambda: compiled(x))
            told = f"{predicted:.1f} MiB foreseen, {measured:.1f} MiB measured"
            console.print(f"peak beyond the input: {told}")


def last() -> Compilation:
    """The record of the newest compilation."""
    record = stator.last_compilation()
    assert record is not None, "something was compiled"
    return record


def start_again(folder: str) -> str:
    """Compile the model in a process that has only the cache; what that took."""
    command = [sys.executable, __file__, "--warm", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def warm(folder: str) -> None:
    """What the new process does."""
    model, ids = model_and_ids()
    options = {"strict": True, "cache_dir": folder}
    infer(torch.compile(model, backend="stator", fullgraph=True, options=options), ids)
    record = last()
    print(f"{1e3 * record.seconds:.0f} ms, cache: {record.cache}")


def model_and_ids() -> tuple[nn.Module, Tensor]:
    """The model and what it is called with."""
    torch.manual_seed(0)
    return Decoder(), torch.randint(VOCABULARY, (BATCH, LENGTH))


def main() -> int:
    """Compare, show, and say by the exit status whether every error bound holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", metavar="FOLDER", help="compile from the cache in FOLDER")
    folder = parser.parse_args().warm
    if folder is not None:
        warm(folder)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        return show(Console(), fresh)


def show(console: Console, folder: str) -> int:
    """All of it, with a cache in `folder`."""
    model, ids = model_and_ids()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    console.print(
        f"A decoder of {millions:.1f} million parameters, {BATCH} × {LENGTH} tokens, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    with Progress(*columns, console=console) as progress:
        outcomes = [
            compare("inference", infer, (model, ids), folder, progress),
            compare("training", train, (model, ids), folder, progress),
        ]
    comparisons = [comparison for comparison, _ in outcomes]
    console.print(speed_and_error(comparisons))
    for comparison, compilation in outcomes:
        console.print(stages(comparison.use, compilation))
    show_memory(console)
    cold = outcomes[0][1].seconds
    console.print(f"\n[bold]Compiling for inference[/]: {1e3 * cold:.0f} ms with an empty cache,")
    console.print(f"in a new process with what that left: {start_again(folder)}")
    return 0 if all(comparison.holds for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
