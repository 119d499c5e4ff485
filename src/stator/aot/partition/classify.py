"""Which nodes of a joint graph belong to the forward, and which to the backward."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from stator.aot.partition.joint import Joint
from stator.graph.edit import is_effect, needed_by, reached_from
from stator.torch_api import is_mutable_op, is_random_op, is_view_op


@dataclass(frozen=True, slots=True)
class Classes:
    """The two sides of a joint graph.  Placeholders of primals count as forward."""

    forward: frozenset[fx.Node]
    backward: tuple[fx.Node, ...]  # in order
    # Of the backward, what depends on no tangent: the forward could compute it as well.
    movable: frozenset[fx.Node] = frozenset()

    def demanded(self, joint: Joint) -> list[fx.Node]:
        """What the backward proper reads of the rest, or returns, in the order of first use."""
        proper = (node for node in self.backward if node not in self.movable)
        read = [source for node in proper for source in node.all_input_nodes]
        read += [grad for grad in joint.grads if isinstance(grad, fx.Node)]
        return [node for node in dict.fromkeys(read) if self.is_early(node)]

    def is_early(self, node: fx.Node) -> bool:
        """Whether the forward computes the node, or could."""
        return node in self.forward or node in self.movable


def classify(joint: Joint) -> Classes:
    """Split the nodes: forward is what values, updates and effects of the forward need."""
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    after_tangents = reached_from(joint.tangents, joint.graph)
    roots = [node for node in joint.values if isinstance(node, fx.Node)]
    roots += [new for _, new in joint.updates if isinstance(new, fx.Node)]
    roots += [
        node
        for node in nodes
        if node.meta.get("in_forward") and is_effect(node) and node not in after_tangents
    ]
    forward = set(joint.primals) | needed_by(roots)
    for node in nodes:  # the parts of a forward result are forward, whoever reads them
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
    wanted = [grad for grad in joint.grads if isinstance(grad, fx.Node)]
    wanted += [node for node in nodes if node not in forward and is_effect(node)]
    needed = needed_by(wanted) - forward
    backward = tuple(node for node in nodes if node in needed and node.op != "placeholder")
    movable: set[fx.Node] = set()
    for node in backward:
        early = all(source in forward or source in movable for source in node.all_input_nodes)
        if early and node not in after_tangents and not is_effect(node) and _is_pure(node):
            movable.add(node)
    return Classes(frozenset(forward), backward, frozenset(movable))


def _is_pure(node: fx.Node) -> bool:
    return not is_random_op(node.target) and not is_mutable_op(node.target)


def leaves_region(node: fx.Node, classes: Classes) -> bool:
    """Whether some forward node outside of the node's checkpointed region reads its value."""
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
