"""Which nodes of a joint graph belong to the forward, and which of them the backward recomputes."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.trace import Traced
from stator.graph.edit import is_effect, needed_by, reached_from
from stator.torch_api import is_random_op, is_view_op


@dataclass(frozen=True, slots=True)
class Classes:
    """The two sides of a joint graph.  Placeholders of primals count as forward."""

    forward: frozenset[fx.Node]
    backward: tuple[fx.Node, ...]  # in order


def classify(traced: Traced) -> Classes:
    """Split the nodes: forward is what values, updates and effects of the forward need."""
    graph = traced.module.graph
    nodes = [node for node in graph.nodes if node.op != "output"]
    after_tangents = reached_from(traced.tangents, graph)
    roots = [node for node in traced.values if isinstance(node, fx.Node)]
    roots += [new for _, new in traced.updates if isinstance(new, fx.Node)]
    roots += [
        node
        for node in nodes
        if node.meta.get("in_forward") and is_effect(node) and node not in after_tangents
    ]
    forward = set(traced.primals) | needed_by(roots)
    for node in nodes:  # the parts of a forward result are forward, whoever reads them
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
    wanted = [grad for grad in traced.grads if isinstance(grad, fx.Node)]
    wanted += [node for node in nodes if is_effect(node) and node not in forward]
    backward = needed_by(wanted) - forward
    return Classes(
        frozenset(forward),
        tuple(node for node in nodes if node in backward and node.op != "placeholder"),
    )


def is_recomputed(node: fx.Node, classes: Classes, kept: frozenset[fx.Node]) -> bool:
    """Whether the backward computes the forward node again instead of having it saved."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if is_view_op(node.target):  # costs nothing, and the base, saved instead, is version-checked
        return node not in kept
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_recomputed(source, classes, kept)
    if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return False
    return _is_checkpointed(node) and not _leaves_region(node, classes)


def _is_checkpointed(node: fx.Node) -> bool:
    policy = node.meta.get("recompute")
    wanted = policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    # Random numbers are saved: drawn again they would be others.
    return wanted and not is_random_op(node.target) and not is_effect(node)


def _leaves_region(node: fx.Node, classes: Classes) -> bool:
    """Whether some forward node outside of the checkpointed region reads the value."""
    region = node.meta.get("ac_graph_id")
    users = list(node.users)
    while users:
        user = users.pop()
        if user not in classes.forward:
            continue
        if user.target is operator.getitem or is_view_op(user.target):
            users += user.users
        elif user.meta.get("ac_graph_id") != region:
            return True
    return False
