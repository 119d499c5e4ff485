"""Graphs of a traced program, compiled: the forward at once, backwards when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from stator.aot.function import BackwardGraph
from stator.aot.metadata import Facts, TangentPlan
from stator.aot.partition.split import Split
from stator.aot.partition.undefined import mark_tangents, without_tangents
from stator.aot.subclasses import tensor_count, width
from stator.aot.trace import Traced
from stator.core.torch_types import Boxed
from stator.graph.edit import mark_donated, needed_by
from stator.torch_api import LazyGraphModule


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A graph as a function, and as data where it can be kept."""

    run: Boxed
    image: Any = None
    overwrites: tuple[int, ...] = ()  # donated inputs that it stores over


CompileGraph = Callable[[fx.GraphModule, str], CompiledGraph]


class Keeper(Protocol):
    """What keeps compiled graphs for other processes."""

    def keep_forward(self, facts: Facts, image: Any) -> None:
        """A program and its forward graph."""
        ...

    def keep_backward(self, missing: tuple[bool, ...], graph: BackwardGraph, image: Any) -> None:
        """A backward graph for one set of tangents."""
        ...


class Compilers(Protocol):
    """What compiles graphs."""

    @property
    def compile_graph(self) -> CompileGraph:
        """A forward or backward graph."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Say that something runs uncompiled; under `Options.strict`, raise."""
        ...


def facts_of(traced: Traced, halves: Split) -> Facts:
    """What the wrappers need to know of a trace."""
    error = None if traced.backward_error is None else str(traced.backward_error)
    needed = _inputs_behind(traced) if halves.backward is not None else ()
    return Facts(traced.program, halves.saved, tuple(needed), error)


def _inputs_behind(traced: Traced) -> list[int]:
    """Inputs of the program that the gradients depend on."""
    owner = {}
    position = 0
    for index, fact in enumerate(traced.program.inputs):
        for _ in range(width(fact.layout)):
            owner[traced.primals[position]] = index
            position += 1
    behind = needed_by(grad for grad in traced.grads if isinstance(grad, fx.Node))
    return sorted({owner[node] for node in behind if node in owner})


@dataclass(frozen=True, slots=True)
class FreshBackward:
    """Compiles backward graphs of a trace."""

    traced: Traced
    halves: Split
    tools: Compilers
    keeper: Keeper | None = None

    def backward(self, missing: tuple[bool, ...]) -> BackwardGraph:
        """The graph for the tangents that are there."""
        assert self.halves.backward is not None, "a program with tangents has a backward"
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.halves.backward.graph, {}))
        placeholders = graph.find_nodes(op="placeholder")[len(self.halves.saved) :]
        groups = _grouped(self.traced.program.tangents, placeholders)
        mark_tangents(graph, placeholders)
        mark_donated(graph, len(self.halves.saved))
        if not self.traced.custom_backward:  # a derivative of the user's gets zeros, as in eager
            _prune(graph, groups, missing)
        present = [i for i, group in enumerate(groups) if not missing[i] or _is_read(group)]
        for index, group in enumerate(groups):
            if index not in present:
                for node in group:
                    graph.erase_node(node)
        metas = [group[0].meta["val"] for group in groups]
        like = tuple((meta.dtype, meta.device) for meta in metas)
        compiled = self._compiled(LazyGraphModule(self.halves.backward, graph, "Backward"))
        found = BackwardGraph(compiled.run, tuple(present), like, compiled.overwrites)
        if self.keeper is not None:
            self.keeper.keep_backward(missing, found, compiled.image)
        return found

    def _compiled(self, module: fx.GraphModule) -> CompiledGraph:
        """The graph compiled; if that fails, executed as it is."""
        try:
            return self.tools.compile_graph(module, "backward")
        except Exception as error:
            self.tools.on_failure(error)
            return CompiledGraph(lambda arguments: module(*arguments))


def _grouped(plans: Sequence[TangentPlan], nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Placeholders by tangent: a subclass has several, its numbers have none."""
    stream = iter(nodes)
    return [[next(stream) for _ in range(tensor_count(plan.layout))] for plan in plans]


def _prune(graph: fx.Graph, groups: list[list[fx.Node]], missing: tuple[bool, ...]) -> None:
    if any(missing):
        absent = [n for group, gone in zip(groups, missing, strict=True) if gone for n in group]
        without_tangents(graph, absent)


def _is_read(group: list[fx.Node]) -> bool:
    return any(node.users for node in group)
