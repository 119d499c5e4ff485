"""What eager's own bits cost: `python -m benchmarks.numerics`.

The same programs compiled with `numerics="fast"` and `numerics="eager"`, called in turn with eager.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch import Tensor, nn

from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import KEEPS_PAGES, THREADS
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread


def chain(x: Tensor) -> Tensor:
    """Sums, products and choices alone: all of it is a kernel either way."""
    return torch.relu((x * 1.3 + 0.5) * x - x / 3) + x.abs() * 0.7


def activations(x: Tensor) -> Tensor:
    """Functions that eager computes its own way."""
    return F.gelu(x * 0.5 + 1) * torch.sigmoid(x) + torch.tanh(x)


class Block(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two products."""
        q, k, v = self.into(self.first(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and whether it is trained."""

    name: str
    make: Callable[[], tuple[Any, Tensor]]
    trained: bool = False


def _elementwise(program: Any, dtype: torch.dtype) -> Callable[[], tuple[Any, Tensor]]:
    return lambda: (program, torch.randn(1 << 20).to(dtype))


def _block() -> tuple[Any, Tensor]:
    return Block(256), torch.randn(8, 128, 256)


CASES: Final = (
    Case("sums and products, float32", _elementwise(chain, torch.float32)),
    Case("sums and products, bfloat16", _elementwise(chain, torch.bfloat16)),
    Case("activations, float32", _elementwise(activations, torch.float32)),
    Case("activations, bfloat16", _elementwise(activations, torch.bfloat16)),
    Case("layer of a transformer, trained", _block, trained=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One program: times over eager's."""

    name: str
    milliseconds: float
    fast: Spread
    exact: Spread
    same: bool  # whether all bits are eager's

    def line(self) -> list[str]:
        """A row of the table."""
        bits = "eager's" if self.same else "**others**"
        return [
            self.name,
            f"{self.milliseconds:.2f}",
            f"{self.fast:.2f}",
            f"{self.exact:.2f}",
            bits,
        ]


def compiled(program: Any, numerics: str) -> Any:
    """The program through Stator."""
    torch._dynamo.reset()
    options = {**STATOR_OPTIONS, "numerics": numerics}
    return torch.compile(program, backend="stator", options=options, dynamic=False)


def measure(case: Case, budget: Budget) -> Row:
    """Eager, fast and exact, called in turn."""
    torch.manual_seed(SEED)
    program, x = case.make()
    ways = [program, compiled(program, "fast"), compiled(program, "eager")]
    calls = [_call(way, x, trained=case.trained) for way in ways]
    results = [_seeded(call) for call in calls]
    series = [Series(call) for call in calls]
    interleave(series, budget)
    eager, fast, exact = (one.seconds for one in series)
    return Row(
        case.name,
        1e3 * Spread.of(eager).median,
        Spread.of_ratios(eager, fast),
        Spread.of_ratios(eager, exact),
        bool(torch.equal(results[0], results[2])),
    )


def _call(way: Any, x: Tensor, *, trained: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        if not trained:
            with torch.no_grad():
                plain: Tensor = way(x)
                return plain
        given = x.detach().requires_grad_()
        result: Tensor = way(given)
        result.sum().backward()
        assert given.grad is not None, "it was asked for"
        return given.grad

    return call


def _seeded(call: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(SEED)
    return call()


def report(rows: Sequence[Row]) -> str:
    """The section of RESULTS.md."""
    headings = ["program", "eager, ms", "`fast`, times as fast", "`eager`, times as fast", "bits"]
    return (
        'The same programs with `numerics="fast"` and `numerics="eager"`, called in turn with'
        " eager: eager's time over theirs, median and quartiles. *bits* says whose the results of"
        f" the latter are. {conditions()}.\n\n"
        f"{markdown_table(headings, [row.line() for row in rows])}\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each, in turn.")] = 30,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 5,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    if any(name not in os.environ for name in KEEPS_PAGES):  # read when a process begins
        arguments = [sys.executable, "-m", "benchmarks.numerics", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **KEEPS_PAGES})
    torch.set_num_threads(THREADS)
    budget = Budget(rounds, seconds)
    rows = [measure(case, budget) for case in track(CASES, description="numerics")]
    text = report(rows)
    print(text)
    if write:
        write_section("numerics", text)


if __name__ == "__main__":
    typer.run(main)
