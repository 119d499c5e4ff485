"""Whether activations inside of convolutions pay: `python -m benchmarks.conv_activation`.

Convolutions of images and what follows, compiled with a kernel behind the call and with the
activation inside of it whatever the rule says, called in turn.  The table is printed;
docs/decisions/2026-11-15-patterns.md keeps it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch import Tensor, fx

import stator
from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.machine import KEEPS_PAGES, THREADS
from benchmarks.results import markdown_table
from benchmarks.row import SEED, Budget, Series, interleave
from benchmarks.spread import Spread
from stator.ops.libraries import onednn_convolution
from stator.passes.post_grad.fuse_conv_activation import ACTIVATIONS, DEEPEST, fuse

Shape = tuple[int, int, int, int, int]  # images, channels, side, channels made, window

SHAPES: Final[tuple[Shape, ...]] = (
    (1, 3, 224, 64, 3),
    (8, 64, 56, 256, 1),
    (1, 64, 112, 128, 1),
    (4, 16, 112, 32, 3),
    (8, 256, 14, 512, 1),
    (8, 64, 56, 64, 3),
    (8, 128, 28, 128, 3),
    (4, 256, 28, 256, 3),
)
BEHIND: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def fuse_every(graph: fx.Graph, _: Any) -> int:
    """Move all activations in, whatever the rule says."""
    found = [
        node
        for target in ACTIVATIONS
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    for node in found:
        fuse(node.args[0], node, onednn_convolution())
    return len(found)


def compiled(program: Callable[..., Tensor], inputs: list[Tensor], *, inside: bool) -> Any:
    """The program, with a kernel behind its convolution or without."""
    torch._dynamo.reset()
    handle = stator.passes.register("post_grad", fuse_every) if inside else None
    # Different options, or Dynamo takes the one's code for the other.
    skipped = {"skip": ("fuse_conv_activation",), "fuel": 1000 if inside else None}
    try:
        options = {**STATOR_OPTIONS, **skipped}
        found = torch.compile(program, backend="stator", options=options, dynamic=False)
        found(*inputs)
    finally:
        if handle is not None:
            handle.remove()
    return found


def measure(shape: Shape, name: str, budget: Budget) -> tuple[float, Spread]:
    """Milliseconds with a kernel, and the time with the activation inside over that."""
    torch.manual_seed(SEED)
    count, channels, side, width, window = shape
    image = torch.randn(count, channels, side, side).to(memory_format=torch.channels_last)
    inputs = [image, torch.randn(width, channels, window, window), torch.randn(width)]

    def program(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return BEHIND[name](F.conv2d(x, w, bias, padding=window // 2))

    with torch.no_grad():
        kernel = Series(partial(compiled(program, inputs, inside=False), *inputs))
        inside = Series(partial(compiled(program, inputs, inside=True), *inputs))
        interleave([kernel, inside], budget)
    ratio = Spread.of_ratios(inside.seconds, kernel.seconds)
    return 1e3 * Spread.of(kernel.seconds).median, ratio


def line(shape: Shape, budget: Budget) -> list[str]:
    """A row of the table."""
    count, channels, side, width, window = shape
    depth = channels * window * window
    measured = [measure(shape, name, budget) for name in BEHIND]
    said = "inside" if depth <= DEEPEST else "behind"
    title = f"{count}×{channels}×{side}², {width} of {window}×{window}"
    times = [f"{ratio:.2f}" for _, ratio in measured]
    return [title, f"{depth}", f"{measured[0][0]:.2f}", *times, said]


def main(
    rounds: Annotated[int, typer.Option(help="Calls of each, in turn.")] = 30,
    seconds: Annotated[float, typer.Option(help="Fewer rounds, if they take longer.")] = 2,
    threads: Annotated[int, typer.Option(help="One, where others use the machine.")] = THREADS,
) -> None:
    """Measure and print a table."""
    if any(name not in os.environ for name in KEEPS_PAGES):  # read when a process begins
        arguments = [sys.executable, "-m", "benchmarks.conv_activation", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **KEEPS_PAGES})
    torch.set_num_threads(threads)
    rows = [line(shape, Budget(rounds, seconds)) for shape in track(SHAPES)]
    print(markdown_table(["convolution", "products", "kernel, ms", *BEHIND, "rule"], rows))


if __name__ == "__main__":
    typer.run(main)
