"""Whether wider rows pay, and what the compiler says of it: `python -m benchmarks.pad_mm`.

40 products, each followed by a relu, compiled as they are and with their rows padded whatever the
cost model says, called in turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import Tensor, fx

import stator
from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import KEEPS_PAGES, THREADS
from benchmarks.results import conditions, markdown_table, write_section
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread
from stator.passes.joint.pad_mm import PRODUCTS, Product, product_of, why_not_padded, widen

SHAPES: Final = (
    *((rows, depth, 1001) for rows in (512, 2048, 8192) for depth in (16, 64, 128, 512)),
    *((rows, depth, 2047) for rows in (1024, 4096) for depth in (8, 32, 63, 100, 256)),
    *((rows, 64, columns) for rows in (4096, 16384) for columns in (33, 65, 129, 257, 513)),
    *((1000, depth, 4095) for depth in (24, 125, 768)),
    *((128, depth, 5003) for depth in (64, 768)),
    (2048, 64, 2048),  # aligned
    (2048, 64, 1000),
    (127, 127, 127),
)
ENOUGH: Final = 1.05  # a smaller difference is none


def program(x: Tensor, w: Tensor) -> Tensor:
    """A product that a kernel reads."""
    return (x @ w).relu()


def pad_every(graph: fx.Graph, _: Any) -> int:
    """Widen all products, whatever the model says."""
    padded = 0
    for target in PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            product = product_of(node)
            if product is not None and product.wide != product.columns:
                widen(node, product)
                padded += 1
    return padded


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: what was measured, and the verdict."""

    product: Product
    ratio: Spread  # time as it is, over time when padded
    milliseconds: float

    @property
    def reason(self) -> str | None:
        """Why it is not padded."""
        return why_not_padded(self.product)

    @property
    def judged(self) -> str:
        """Whether the verdict was right, as measured."""
        gain = self.ratio.median
        if self.reason is None:
            return "right" if gain > 1 / ENOUGH else "**wrong**"
        return "right" if gain < ENOUGH else "missed"

    def line(self) -> list[str]:
        """A row of the table."""
        product = self.product
        return [
            f"{product.rows}×{product.depth}×{product.columns}",
            f"{self.milliseconds:.2f}",
            f"{self.ratio:.2f}",
            "padded" if self.reason is None else f"as it is: {self.reason}",
            self.judged,
        ]


def compiled(inputs: Sequence[Tensor], *, padded: bool) -> Any:
    """The program, its product as it is or padded."""
    torch._dynamo.reset()
    handle = stator.passes.register("joint", pad_every) if padded else None
    # Different options, or Dynamo takes the one's code for the other.
    options = {**STATOR_OPTIONS, "skip": ("pad_mm",), "fuel": 1000 if padded else None}
    try:
        found = torch.compile(program, backend="stator", options=options, dynamic=False)
        found(*inputs)
    finally:
        if handle is not None:
            handle.remove()
    return found


def measure(shape: tuple[int, int, int], budget: Budget) -> Row:
    """Both ways, called in turn."""
    torch.manual_seed(SEED)
    rows, depth, columns = shape
    inputs = torch.randn(rows, depth), torch.randn(depth, columns)
    with torch.no_grad():
        plain = Series(partial(compiled(inputs, padded=False), *inputs))
        padded = Series(partial(compiled(inputs, padded=True), *inputs))
        interleave([plain, padded], budget)
    ratio = Spread.of_ratios(plain.seconds, padded.seconds)
    product = Product(1, rows, depth, columns, 4)
    return Row(product, ratio, 1e3 * Spread.of(plain.seconds).median)


def report(rows: Sequence[Row]) -> str:
    """The section of RESULTS.md."""
    headings = ["rows×depth×columns", "as it is, ms", "gained by padding", "verdict", "measured"]
    judged = [row.judged for row in rows]
    return (
        "A product and a relu in float32, as they are and with rows padded to cache lines, called"
        " in turn: time of the first over time of the second, median and quartiles. *verdict* is"
        " the cost model's, *measured* whether that was right (a twentieth is no difference)."
        f" {judged.count('right')} of {len(rows)} verdicts are right, {judged.count('missed')} miss"
        f" a gain, {judged.count('**wrong**')} lose. {conditions()}.\n\n"
        f"{markdown_table(headings, [row.line() for row in rows])}\n"
    )


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each, in turn.")] = 30,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 2,
    write: Annotated[bool, typer.Option(help="Write benchmarks/RESULTS.md.")] = True,
) -> None:
    """Measure, print a table and write it down."""
    if any(name not in os.environ for name in KEEPS_PAGES):  # read when a process begins
        arguments = [sys.executable, "-m", "benchmarks.pad_mm", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **KEEPS_PAGES})
    torch.set_num_threads(THREADS)
    text = report([measure(shape, Budget(rounds, seconds)) for shape in track(SHAPES)])
    print(text)
    if write:
        write_section("pad_mm", text)


if __name__ == "__main__":
    typer.run(main)
