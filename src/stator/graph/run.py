"""Run one pass: skip it or time it, verify what it left, dump before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import fx

from stator.core.dump import Dump
from stator.core.events import Compilation
from stator.core.fuel import Fuel
from stator.graph.compare import Before
from stator.graph.verify import verify
from stator.options import Options

CAPTURED: Final = "captured"  # what the graph is called that Dynamo captured


@dataclass(frozen=True, slots=True)
class Ctx:
    """What a pass may use beside its graph."""

    options: Options = field(default_factory=Options)
    fuel: Fuel = field(default_factory=Fuel)
    record: Compilation = field(default_factory=Compilation)
    examples: tuple[Any, ...] = ()  # the user's inputs, where values are compared

    @property
    def dump(self) -> Dump:
        """Where texts go.  One folder a compilation: a program of several graphs has several."""
        folder = self.options.dump_dir
        return Dump(None if folder is None else folder / f"compilation_{self.record.number:03}")


class GraphPass(Protocol):
    """A rewrite of a whole graph; returns how many changes it made."""

    __name__: str

    def __call__(self, graph: fx.Graph, ctx: Ctx) -> int: ...


def run_passes(passes: Iterable[GraphPass], graph: fx.Graph, ctx: Ctx, name: str) -> None:
    """Run `passes` in order over `graph`, which is called `name` in events and dumps."""
    for pass_ in passes:
        if pass_.__name__ in ctx.options.skip:
            ctx.record.notes.append(f"{name}: {pass_.__name__} skipped by Options.skip")
            continue
        run_pass(pass_, graph, ctx, name)


def run_pass(pass_: GraphPass, graph: fx.Graph, ctx: Ctx, name: str) -> int:
    """Run one pass; the graph is verified after it where the options ask for it."""
    label = f"{name}/{pass_.__name__}"
    before = str(graph) if ctx.options.dump_dir else ""
    values = Before.of(graph, ctx.examples) if ctx.options.verify_passes == "values" else None
    with ctx.record.stage(label, len(graph.nodes)) as progress:
        progress.changed = pass_(graph, ctx)
        progress.nodes = len(graph.nodes)
    number = f"{len(ctx.record.stages):03}"
    ctx.dump.write(f"{number}_{pass_.__name__}_before.txt", lambda: before)
    ctx.dump.write(f"{number}_{pass_.__name__}_after.txt", lambda: str(graph))
    if ctx.options.verify:
        verify(graph, after=label, functional=name != CAPTURED)
    if values is not None and progress.changed:
        values.compare(graph, after=label)
    return progress.changed


def dump_graph(graph: fx.Graph, ctx: Ctx, name: str) -> str:
    """Keep the text of a finished graph in the record, and in the dump folder.

    Returns the name that it has there: of several with one name, later ones get a number.
    """
    graphs = ctx.record.graphs
    count = sum(known == name or known.startswith(f"{name}_") for known in graphs)
    label = f"{name}_{count + 1}" if count else name
    graphs[label] = str(graph)
    ctx.dump.write(f"{label}.txt", lambda: graphs[label])
    return label
