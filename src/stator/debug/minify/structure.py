"""Strategies that cut a graph: fewer outputs, no tail, windows of nodes turned into inputs."""

from __future__ import annotations

from collections.abc import Iterator

from stator.debug.minify.case import Case, extract
from stator.debug.minify.search import Search


def remove_outputs(search: Search, granularity: int) -> Iterator[Case | None]:
    """One window of the outputs alone, or all but one window; what only they need goes too."""
    outputs = search.case.outputs
    size = min(granularity, max(1, len(outputs) // 2))
    for start in range(0, len(outputs), size) if len(outputs) > 1 else ():
        window = outputs[start : start + size]
        yield extract(search.case, window, (), search.values)
    for start in range(0, len(outputs), size) if len(outputs) > 1 else ():
        others = outputs[:start] + outputs[start + size :]
        yield extract(search.case, others, (), search.values)


def truncate(search: Search, granularity: int) -> Iterator[Case | None]:
    """The graph up to one node, which is then its result; earlier nodes first."""
    calls = search.case.calls
    for place in range(granularity - 1, len(calls) - 1, granularity):
        if (place + 1) % (2 * granularity) or granularity == 1:
            yield extract(search.case, (calls[place],), (), search.values)


def cut_windows(search: Search, granularity: int) -> Iterator[Case | None]:
    """A window of nodes turned into inputs that hold what eager computed; early ones first."""
    calls = search.case.calls
    for start in range(0, len(calls), granularity):
        window = calls[start : start + granularity]
        yield extract(search.case, search.case.outputs, window, search.values)
        # With what the window reads as outputs: the failure may need both ends of the way.
        sources = (source for node in window for source in node.all_input_nodes)
        ends = dict.fromkeys((*search.case.outputs, *sources))
        yield extract(search.case, (node for node in ends), window, search.values)


def drop_dead(search: Search, granularity: int) -> Iterator[Case | None]:
    """The graph without what nothing needs, inputs included."""
    del granularity
    yield extract(search.case, search.case.outputs, (), search.values)
