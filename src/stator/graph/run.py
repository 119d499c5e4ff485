"""Run one pass: skip it or time it, verify what it left, dump before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import fx

from stator.core import faults
from stator.core.dump import Dump
from stator.core.events import Compilation, Details, NodeText, PassNote
from stator.core.fuel import Fuel
from stator.core.logs import logger
from stator.graph.compare import Before
from stator.graph.text import graph_text
from stator.graph.verify import verify
from stator.options import Options

log: Final = logger("passes")

CAPTURED: Final = "captured"  # what the graph is called that Dynamo captured


@dataclass(frozen=True, slots=True)
class Ctx:
    """What a pass may use beside its graph."""

    options: Options = field(default_factory=Options)
    fuel: Fuel = field(default_factory=Fuel)  # for rewrites
    record: Compilation = field(default_factory=Compilation)
    examples: tuple[Any, ...] = ()  # the user's inputs, where values are compared
    pass_fuel: Fuel = field(default_factory=Fuel)
    kernel_fuel: Fuel = field(default_factory=Fuel)  # for operators that become kernels
    has_python: bool = True  # where the program runs: otherwise C passes all arguments

    @property
    def dump(self) -> Dump:
        """Where texts go.  One folder a compilation: a program of several graphs has several."""
        folder = self.options.dump_dir
        return Dump(None if folder is None else folder / f"compilation_{self.record.number:03}")

    def may(self, rewrite: str, node: fx.Node, reason: str | None, words: tuple[str, str]) -> bool:
        """Whether to do a rewrite: nothing is a `reason` against it, and there is fuel.

        A note says what became of it, by one of the `words`: what it is if so, or what it is not.
        """
        if reason is None and not self.fuel.spend(f"{rewrite}: {node.name}"):
            return False
        done, not_done = words
        said = done if reason is None else f"{not_done}: {reason}"
        self.record.notes.append(f"{node.name} {said}")
        return reason is None


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
        if not ctx.pass_fuel.spend(f"{name}/{pass_.__name__}"):
            ctx.record.notes.append(f"{name}: {pass_.__name__} skipped by Options.pass_fuel")
            continue
        run_pass(pass_, graph, ctx, name)
    if ctx.options.verify:
        after = f"{name}: a pass that says it changed nothing"
        verify(graph, after, functional=name != CAPTURED)


def run_pass(pass_: GraphPass, graph: fx.Graph, ctx: Ctx, name: str) -> int:
    """Run one pass; a graph that it changed is verified where the options ask for it."""
    label = f"{name}/{pass_.__name__}"
    before = str(graph) if ctx.options.dump_dir else ""
    values = Before.of(graph, ctx.examples) if ctx.options.verify_passes == "values" else None
    noting = _Noting.of(graph, ctx, name)
    with ctx.record.stage(label, len(graph.nodes)) as progress:
        progress.changed = pass_(graph, ctx)
        if faults.SET:
            about = (pass_.__name__, graph, ctx.fuel)
            progress.changed = faults.strike("pass", progress.changed, *about)
        progress.nodes = len(graph.nodes)
    log.debug("%s: %d rewrites, %d nodes", label, progress.changed, progress.nodes)
    if noting is not None:
        noting.finish(pass_.__name__, progress.changed)
    number = f"{len(ctx.record.stages):03}"
    ctx.dump.write(f"{number}_{pass_.__name__}_before.txt", lambda: before)
    ctx.dump.write(f"{number}_{pass_.__name__}_after.txt", lambda: str(graph))
    if ctx.options.verify and progress.changed != 0:
        verify(graph, after=label, functional=name != CAPTURED)
    if values is not None and progress.changed:
        values.compare(graph, after=label)
    return progress.changed


@dataclass(frozen=True, slots=True)
class _Noting:
    """Takes down what a pass does, where an explanation is asked for."""

    graph: fx.Graph
    ctx: Ctx
    name: str
    details: Details
    before: tuple[NodeText, ...]
    spent: int

    @staticmethod
    def of(graph: fx.Graph, ctx: Ctx, name: str) -> _Noting | None:
        """Begin; None if nobody asks."""
        details = ctx.record.details
        if details is None:
            return None
        before = details.texts.get(name, ())
        if [line[0] for line in before] != [node.name for node in graph.nodes]:
            before = graph_text(graph)
        return _Noting(graph, ctx, name, details, before, len(ctx.fuel.spent))

    def finish(self, pass_name: str, changed: int) -> None:
        """Note what changed, and the names of the rewrites."""
        after = graph_text(self.graph) if changed else self.before
        self.details.texts[self.name] = after
        rewrites = tuple(self.ctx.fuel.spent[self.spent :])
        seconds = self.ctx.record.stages[-1].seconds
        note = PassNote(self.name, pass_name, seconds, rewrites, self.before, after)
        self.details.passes.append(note)


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
