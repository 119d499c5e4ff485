"""Run one pass: skip it or time it, verify what it left, dump before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from stator.core.events import Compilation
from stator.core.fuel import Fuel
from stator.graph.verify import verify
from stator.options import Options


@dataclass(frozen=True, slots=True)
class Ctx:
    """What a pass may use beside its graph."""

    options: Options = field(default_factory=Options)
    fuel: Fuel = field(default_factory=Fuel)
    record: Compilation = field(default_factory=Compilation)


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
    with ctx.record.stage(label, len(graph.nodes)) as progress:
        progress.changed = pass_(graph, ctx)
        progress.nodes = len(graph.nodes)
    if ctx.options.dump_dir:
        number = len(ctx.record.stages)
        _dump(ctx, f"{number:03}_{pass_.__name__}_before", before)
        _dump(ctx, f"{number:03}_{pass_.__name__}_after", str(graph))
    if ctx.options.verify:
        verify(graph, after=label)
    return progress.changed


def dump_graph(graph: fx.Graph, ctx: Ctx, name: str) -> None:
    """Keep the text of a finished graph in the record, and in the dump folder."""
    ctx.record.graphs[name] = str(graph)
    if ctx.options.dump_dir:
        _dump(ctx, name.replace("/", "_"), str(graph))


def _dump(ctx: Ctx, name: str, text: str) -> None:
    """One folder a compilation: a program of several graphs has several."""
    assert ctx.options.dump_dir is not None, "there is somewhere to dump to"
    folder = ctx.options.dump_dir / f"compilation_{ctx.record.number:03}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text + "\n")
