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
    again, movable = cut.again, classes.movable
    done: set[fx.Node] = {*cut.kept, *cut.relays, *joint.tangents}
    for node in classes.backward:
        if node in movable:  # the forward has computed it, or it comes where it is read
            continue
        missing = [one for one in sources(node) if one in again and one not in done]
        if missing:  # most have all they read
            _run_again_before(missing, (again, done), sources, order)
        done.add(node)
        order.append((node, False))
    for grad in joint.grads:
        if isinstance(grad, fx.Node):
            _run_again_before([grad], (again, done), sources, order)
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


def _run_again_before(
    wanted: Collection[fx.Node],
    known: tuple[Collection[fx.Node], set[fx.Node]],
    sources: Sources,
    order: list[Run],
) -> None:
    """Run what `wanted` takes, sources first: late, so that it lives shortly.

    `known` is what is computed again, and what of it is there.
    """
    again, done = known
    stack = [*wanted]
    while stack:
        node = stack[-1]
        first = () if node in done else sources(node)
        missing = [one for one in first if one in again and one not in done]
        if missing:
            stack += missing
            continue
        stack.pop()
        if node in again and node not in done:
            done.add(node)
            order.append((node, False))
