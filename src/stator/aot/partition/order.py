"""In which order the backward runs: its own nodes as recorded, the others when they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.graph.edit import needed_by

Sources = Callable[[fx.Node], Collection[fx.Node]]
Run = tuple[fx.Node, bool]  # a node, and whether this is its first run of two


def sources_of(node: fx.Node) -> Collection[fx.Node]:
    """What a node reads."""
    found: list[fx.Node] = node.all_input_nodes
    return found


def backward_order(
    joint: Joint, classes: Classes, cut: Cut, sources: Sources = sources_of
) -> list[Run]:
    """Nodes to run; the first run of two leaves the relays."""
    order: list[Run] = []
    if cut.relays:
        behind = computed_twice(cut, sources)
        order += [(node, True) for node in joint.graph.nodes if node in behind]
    movable = classes.movable
    missing = set(cut.again.difference(cut.relays))
    for node in classes.backward:
        if node in movable:  # the forward has computed it, or it comes where it is read
            continue
        read = sources(node)
        if not missing.isdisjoint(read):  # most have all they read
            _run_before(read, missing, sources, order)
        order.append((node, False))
    _run_before([n for n in joint.grads if isinstance(n, fx.Node)], missing, sources, order)
    return order


def forward_nodes(classes: Classes, cut: Cut) -> set[fx.Node]:
    """What the forward computes: its own, and what it computes in place of the backward."""
    return set(classes.forward) | needed_by(cut.kept)


def computed_twice(cut: Cut, sources: Sources = sources_of) -> set[fx.Node]:
    """The relays of a cut and what they are computed from, down to what is kept."""
    needed: set[fx.Node] = set()
    stops = frozenset(cut.kept)
    stack = list(cut.relays)
    while stack:
        node = stack.pop()
        if node not in needed and node not in stops:
            needed.add(node)
            stack += sources(node)
    return needed


def _run_before(
    wanted: Collection[fx.Node], missing: set[fx.Node], sources: Sources, order: list[Run]
) -> None:
    """Run what of `wanted` is missing, sources first: late, so that it lives shortly."""
    stack = [node for node in wanted if node in missing]
    while stack:
        node = stack[-1]
        before = [one for one in sources(node) if one in missing] if node in missing else ()
        if before:
            stack += before
            continue
        stack.pop()
        if node in missing:
            missing.remove(node)
            order.append((node, False))
