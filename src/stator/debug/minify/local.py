"""A strategy for faults that lie in a few neighbouring nodes, as nearly all do.

A node alone, with one of its sources, or with all of them up to a depth, is a graph of its own, on
recorded inputs.  Those that differ are compiled together: one compilation asks many of them.  If it
fails, halves of them follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx

from stator.debug.minify.case import Case, as_module, can_be_input, is_call
from stator.debug.minify.record import Recorded
from stator.debug.minify.search import Search

MOST: Final = 150  # neighbourhoods in one compilation

Around = tuple[fx.Node, ...]  # nodes in the graph's order; the last is what is computed


def find_local(search: Search) -> bool:
    """Whether one neighbourhood alone fails; it is the case then."""
    for words, around in _SHAPES.items():
        search.tell(f"each {words}", search.case)
        found = _different(search, around)
        for start in range(0, len(found), MOST):
            if _found_among(search, found[start : start + MOST]):
                return True
    return False


def _alone(node: fx.Node) -> Iterator[list[fx.Node]]:
    yield [node]


def _with_one_source(node: fx.Node) -> Iterator[list[fx.Node]]:
    for source in node.all_input_nodes:
        if is_call(source):
            yield [source, node]


def _ball(depth: int) -> Callable[[fx.Node], Iterator[list[fx.Node]]]:
    def around(node: fx.Node) -> Iterator[list[fx.Node]]:
        reached, found = [node], {node}
        for _ in range(depth - 1):
            sources = (source for one in reached for source in one.all_input_nodes)
            reached = [source for source in dict.fromkeys(sources) if is_call(source)]
            found.update(reached)
        yield list(found)

    return around


_SHAPES: Final[dict[str, Callable[[fx.Node], Iterator[list[fx.Node]]]]] = {
    "node alone": _alone,
    "node with one source": _with_one_source,
    "node with its sources": _ball(2),
    "node with theirs too": _ball(3),
}


def _found_among(search: Search, around: Sequence[Around]) -> bool:
    """Halve a set of neighbourhoods that fails, until one of them is left."""
    if not search.is_failing(_together(search, around)):
        return False
    while len(around) > 1:
        half = around[: len(around) // 2]
        # If the first half does not fail, the second should: the last one is asked in any case.
        around = half if search.is_failing(_together(search, half)) else around[len(half) :]
    smaller = len(around[0]) < len(search.case.calls)
    return smaller and search.attempt(_together(search, around))


def _different(
    search: Search, around: Callable[[fx.Node], Iterator[list[fx.Node]]]
) -> list[Around]:
    """One neighbourhood of each kind, the last ones first."""
    found: dict[str, Around] = {}
    for node in reversed(search.case.calls):
        if can_be_input(node, search.values):
            for some in around(node):
                closed = _closed(some, search.values)
                found.setdefault(_key(closed, search.values), closed)
    return list(found.values())


def _closed(nodes: Iterable[fx.Node], values: Recorded) -> Around:
    """The nodes, and the sources that are no tensors, so that they cannot be inputs."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [s for s in node.all_input_nodes if is_call(s) and not can_be_input(s, values)]
    return tuple(sorted(found))


def _key(nodes: Around, values: Recorded) -> str:
    """What a neighbourhood computes, from which kinds of inputs."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in numbers:
                lines.append(f"{len(numbers)}: {_kind(values(source))}")
                numbers[source] = len(numbers)
        inner = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)),
            lambda value: f"%{numbers[value]}" if isinstance(value, fx.Node) else repr(value),
        )
        numbers[node] = len(numbers)
        lines.append(f"{numbers[node]} = {node.target} {inner}")
    return "\n".join(lines)


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return str(value.dtype), tuple(value.size()), tuple(value.stride()), value.requires_grad


def _together(search: Search, around: Sequence[Around]) -> Case:
    """One graph of several neighbourhoods, which share inputs and nothing else."""
    graph = fx.Graph()
    leaves = {
        source: None
        for nodes in around
        for node in nodes
        for source in node.all_input_nodes
        if source not in nodes
    }
    inputs = {node: graph.placeholder(node.name) for node in leaves}
    results = []
    for nodes in around:
        made = dict(inputs)
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        results.append(made[nodes[-1]])
    graph.output(tuple(results))
    values = tuple(search.values(node) for node in inputs)
    return Case(as_module(search.case.module, graph), values)
