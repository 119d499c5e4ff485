"""Cut a joint graph into a forward and a backward graph, saving what the backward needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stator.aot.metadata import Kept, Saved
from stator.aot.partition.classify import Classes, classify
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.trace import Traced
from stator.graph.edit import drop_unread, needed_by

aten = torch.ops.aten

Choose = Callable[[Joint, Classes], Cut]


@dataclass(frozen=True, slots=True)
class Split:
    """Two graphs.

    forward:  primals -> values, extras
    backward: saved tensors, saved numbers, tangents -> gradients
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[Saved, ...]  # tensors first


def split(traced: Traced, choose: Choose) -> Split:
    """Cut `traced` so that the backward starts from the forward values that `choose` keeps."""
    joint = Joint.of(traced)
    classes = classify(joint)
    if not traced.tangents:
        return Split(_forward(traced, joint, classes.forward, []), None, ())
    cut = choose(joint, classes)
    saved_nodes = sorted(cut.kept, key=_is_number)
    position = {node: i for i, node in enumerate(traced.primals)}
    returned = {node: i for i, node in reversed(list(enumerate(traced.values)))}
    saved: list[Saved] = []
    extras: list[fx.Node] = []
    for node in saved_nodes:
        if node in joint.keepers:
            saved.append(Saved(Kept.EXTRA, len(extras), is_tensor=True))
            extras.append(node)
        elif node in position:
            saved.append(Saved(Kept.PRIMAL, position[node], not _is_number(node)))
        elif node in returned:
            saved.append(Saved(Kept.VALUE, returned[node], not _is_number(node)))
        else:
            saved.append(Saved(Kept.EXTRA, len(extras), not _is_number(node)))
            extras.append(node)
    return Split(
        _forward(traced, joint, classes.forward | needed_by(extras), extras),
        _backward(traced, classes, saved_nodes, cut.again),
        tuple(saved),
    )


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _forward(
    traced: Traced, joint: Joint, nodes: Iterable[fx.Node], extras: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted = set(nodes) | set(traced.primals)
    for node in traced.module.graph.nodes:
        if node in wanted:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    kept = [_keep(graph, copies[node], joint.keepers.get(node)) for node in extras]
    for target, new in traced.updates:
        update = graph.call_function(aten.copy_.default, (copies[target], _mapped(new, copies)))
        update.meta["val"] = target.meta["val"]
    graph.output((*(_mapped(node, copies) for node in traced.values), *kept))
    drop_unread(graph)
    return fx.GraphModule(traced.module, graph, "Forward")


def _keep(graph: fx.Graph, node: fx.Node, keeper: Any) -> fx.Node:
    if keeper is None:
        return node
    kept = graph.call_function(keeper, (node,))
    kept.meta["val"] = node.meta["val"]
    return kept


def _backward(
    traced: Traced, classes: Classes, saved: list[fx.Node], again: Collection[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*saved, *traced.tangents):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in classes.backward:
        if node in classes.movable:  # the forward has computed it, or it comes where it is read
            continue
        for source in _in_order(node, again, copies):
            copies[source] = graph.node_copy(source, copies.__getitem__)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for grad in traced.grads:
        if isinstance(grad, fx.Node):
            for source in _in_order(grad, again, copies, including=True):
                copies[source] = graph.node_copy(source, copies.__getitem__)
    graph.output(tuple(_mapped(node, copies) for node in traced.grads))
    drop_unread(graph)
    return fx.GraphModule(traced.module, graph, "Backward")


def _in_order(
    node: fx.Node,
    again: Collection[fx.Node],
    done: dict[fx.Node, fx.Node],
    *,
    including: bool = False,
) -> list[fx.Node]:
    """Nodes to compute again before `node`, sources first: late, so that they live shortly."""
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    stack = [(source, False) for source in ([node] if including else node.all_input_nodes)]
    while stack:
        current, ready = stack.pop()
        if current in done or current in placed or current not in again:
            continue
        if ready:
            placed.add(current)
            order.append(current)
        else:
            stack.append((current, True))
            stack += [(source, False) for source in current.all_input_nodes]
    return order


def _mapped(value: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    return copies[value] if isinstance(value, fx.Node) else value
