"""Cut a joint graph into a forward and a backward graph, saving what the backward needs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from stator.aot.metadata import Kept, Saved
from stator.aot.partition.classify import Classes, classify
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.order import backward_order, forward_nodes
from stator.aot.partition.weigh import bytes_of, is_generated
from stator.aot.trace import Traced
from stator.graph.edit import AGAIN, CALLERS, EARLY, EXTRAS, KEPT, PART, drop_unread
from stator.torch_api import LazyGraphModule, is_view_op

aten = torch.ops.aten

Choose = Callable[[Joint, Classes, Callable[["Cut"], "Split"]], Cut]


@dataclass(frozen=True, slots=True)
class Split:
    """Two graphs.

    forward:  primals -> values, extras
    backward: saved tensors, saved numbers, tangents -> gradients
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[Saved, ...]  # tensors first
    inputs: int = 0  # bytes that the caller holds in any case
    outputs: int = 0  # bytes that it gets


def split(traced: Traced, choose: Choose) -> Split:
    """Cut `traced` so that the backward starts from the forward values that `choose` keeps."""
    joint = Joint.of(traced)
    classes = classify(joint)
    build = partial(_build, traced, joint, classes)
    if not traced.tangents:
        return build(None)
    return build(choose(joint, classes, build))


def _build(traced: Traced, joint: Joint, classes: Classes, cut: Cut | None) -> Split:
    """The halves under a cut; a forward alone without one."""
    inputs = sum(bytes_of(node.meta.get("val")) for node in traced.primals)
    values = {node for node in traced.values if isinstance(node, fx.Node)} - {*traced.primals}
    outputs = sum(bytes_of(node.meta.get("val")) for node in values)
    if cut is None:
        forward = _forward(traced, joint, classes.forward, [])
        return Split(forward, None, (), inputs, outputs)
    copies = dict.fromkeys(cut.copied, aten.clone.default)
    joint = replace(joint, keepers={**joint.keepers, **copies})
    saved, extras = _places(traced, joint, cut)
    return Split(
        _forward(traced, joint, forward_nodes(classes, cut), extras),
        _backward(traced, joint, classes, cut),
        tuple(saved),
        inputs,
        outputs,
    )


def _places(traced: Traced, joint: Joint, cut: Cut) -> tuple[list[Saved], list[fx.Node]]:
    """Where each value that is kept comes from, and what the forward returns for that alone."""
    position = {node: i for i, node in enumerate(traced.primals)}
    returned = {node: i for i, node in reversed(list(enumerate(traced.values)))}
    saved: list[Saved] = []
    extras: list[fx.Node] = []
    for node in _tensors_first(cut):
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
    return saved, extras


def _tensors_first(cut: Cut) -> list[fx.Node]:
    """What is kept: tensors first."""
    return sorted(cut.kept, key=_is_number)


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
    output = graph.output((*(_mapped(node, copies) for node in traced.values), *kept))
    output.meta[EXTRAS] = tuple(node.name for node in extras)
    drop_unread(graph)
    return LazyGraphModule(traced.module, graph, "Forward")


def _keep(graph: fx.Graph, node: fx.Node, keeper: Any) -> fx.Node:
    if keeper is None:
        return node
    kept = graph.call_function(keeper, (node,))
    kept.meta["val"] = node.meta["val"]
    return kept


def _backward(traced: Traced, joint: Joint, classes: Classes, cut: Cut) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    owned = set(joint.primals) | {node for node in joint.values if isinstance(node, fx.Node)}
    for node in (*_tensors_first(cut), *traced.tangents):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {
            **node.meta,
            CALLERS: node in owned and node not in joint.keepers,
            PART: node.target is operator.getitem and not is_generated(node),
        }
    early: dict[fx.Node, fx.Node] = dict(copies)
    for node, is_early in backward_order(joint, classes, cut):
        found = early if is_early else copies
        found[node] = graph.node_copy(node, found.__getitem__)
        if is_early:
            found[node].meta[EARLY] = True
            if node in cut.relays:
                found[node].meta[KEPT] = True
                copies[node] = found[node]
        elif node in cut.again and not is_generated(node) and not is_view_op(node.target):
            found[node].meta[AGAIN] = True
    graph.output(tuple(_mapped(node, copies) for node in traced.grads))
    drop_unread(graph)
    return LazyGraphModule(traced.module, graph, "Backward")


def _mapped(value: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    return copies[value] if isinstance(value, fx.Node) else value
