"""What parts of a compiler take on GPT-2 of several depths: ours beside PyTorch's, in turn.

Widths are small, for what is timed works on graphs and does not see them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from benchmarks.contenders import STATOR_OPTIONS
from benchmarks.models import text
from benchmarks.models.built import Built
from benchmarks.row import SEED
from benchmarks.spread import Spread
from stator.core.events import Compilation, collected_records
from stator.core.undisturbed import with_room

SMALL: Final = replace(text.TINY, width=64, inner=128, length=32)
OURS: Final = "stator"


@dataclass(slots=True)
class Clock:
    """Seconds in some part of a compiler, and how many nodes it was given."""

    seconds: float = 0.0
    nodes: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts."""

        def call(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.nodes += len(module.graph.nodes)
            begin = time.perf_counter()
            try:
                return function(module, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


Contender: TypeAlias = Callable[[Built], Clock]


def step(built: Built, program: Any) -> None:
    """One training step."""
    program(*built.inputs).backward()
    for parameter in built.module.parameters():
        parameter.grad = None


def records_of(
    built: Built, run: Callable[[Built, Any], Any], options: Mapping[str, Any]
) -> list[Compilation]:
    """What we wrote down of each graph of a model, compiled and run as `run` does."""
    torch._dynamo.reset()
    program = torch.compile(built.module, backend="stator", options={**STATOR_OPTIONS, **options})
    with collected_records() as records:
        run(built, program)
    return records


@dataclass(slots=True)
class Depth:
    """All measurements of one depth."""

    layers: int
    clocks: dict[str, list[Clock]] = field(default_factory=dict)

    def line(self, peer: str) -> list[str]:
        """A row of a table: layers, nodes, times of both, their ratio, microseconds a node."""
        ours, theirs = ([clock.seconds for clock in self.clocks[name]] for name in (OURS, peer))
        nodes = self.clocks[OURS][0].nodes
        return [
            str(self.layers),
            str(nodes),
            f"{Spread.of([1e3 * seconds for seconds in ours]):.0f}",
            f"{Spread.of([1e3 * seconds for seconds in theirs]):.0f}",
            f"{Spread.of_ratios(ours, theirs):.2f}",
            f"{1e6 * Spread.of(ours).median / nodes:.0f}",
        ]


def headings(peer: str) -> list[str]:
    """Of that row."""
    return ["layers", "nodes", "stator, ms", f"{peer}, ms", f"of {peer}'s", "µs a node"]


def measure(layers: int, rounds: int, contenders: Mapping[str, Contender]) -> Depth:
    """All contenders in turn, each with room for Python's frames and no waste of the others.

    Else by how deep this is called, and by what was allocated before, the same work takes three
    times as long, or half a second more.
    """
    torch.manual_seed(SEED)
    built = text.gpt2(replace(SMALL, layers=layers), train=True)
    depth = Depth(layers, {name: [] for name in contenders})
    for _ in range(rounds):
        for name, contender in contenders.items():
            gc.collect()
            gc.freeze()
            depth.clocks[name].append(with_room(contender)(built))
            gc.unfreeze()
    return depth
