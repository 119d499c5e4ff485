"""In which order the backward runs: its own nodes as recorded, the others when they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import fx

from stator.aot.partition.classify import Classes
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.graph.edit import needed_by

Sources = Callable[[fx.Node], Collection[fx.Node]]


def sources_of(node: fx.Node) -> Collection[fx.Node]:
    """What a node reads."""
    found: list[fx.Node] = node.all_input_nodes
    return found


def backward_order(
    joint: Joint, classes: Classes, cut: Cut, sources: Sources = sources_of
) -> Iterator[tuple[fx.Node, bool]]:
    """Nodes to run, each with whether that is its first run of two, which leaves the relays."""
    if cut.relays:
        behind = computed_twice(cut, sources)
        yield from ((node, True) for node in joint.graph.nodes if node in behind)
    again = cut.again
    done: set[fx.Node] = {*cut.kept, *cut.relays, *joint.tangents}
    for node in classes.backward:
        if node in classes.movable:  # the forward has computed it, or it comes where it is read
            continue
        missing = [one for one in sources(node) if one in again and one not in done]
        if missing:  # most have all they read
            for source in _again_before(missing, again, done, sources):
                yield source, False
        done.add(node)
        yield node, False
    for grad in joint.grads:
        if isinstance(grad, fx.Node):
            for source in _again_before([grad], cut.again, done, sources):
                yield source, False


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


def _again_before(
    wanted: Collection[fx.Node], again: Collection[fx.Node], done: set[fx.Node], sources: Sources
) -> Iterator[fx.Node]:
    """What has to be computed again for `wanted`, sources first: late, so that it lives shortly."""
    stack = [(node, False) for node in wanted]
    while stack:
        node, ready = stack.pop()
        if node in done or node not in again:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack += [
                (source, False)
                for source in sources(node)
                if source in again and source not in done
            ]
