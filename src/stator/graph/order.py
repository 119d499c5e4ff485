"""The order of a graph's nodes."""

from __future__ import annotations

from torch import fx


def stable_topological_sort(graph: fx.Graph) -> None:
    """Move nodes behind their arguments, and leave them in their order otherwise.

    A node that comes too early waits for the last of its arguments that is not there yet.
    """
    ready: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    cursor: fx.Node | None = None
    todo = list(reversed(list(graph.nodes)))
    while todo:
        node = todo.pop()
        missing = [source for source in node.all_input_nodes if source not in ready]
        if missing:
            waiting.setdefault(missing[-1], []).append(node)
            continue
        ready.add(node)
        if cursor is not None and cursor.next is not node:
            cursor.append(node)
        cursor = node
        todo.extend(reversed(waiting.pop(node, [])))
    assert not waiting, f"the graph has a circle through {next(iter(waiting))}"
