"""Which values of a graph may lie in the same memory, and who else sees that memory.

A pass that lets the readers of a copy read its source asks here first: the copy may be there so
that the caller gets memory of its own, or keeps what is about to be written over.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import fx

from stator.graph.verify import is_input_update
from stator.torch_api import is_mutable_op, keeps_nothing

aten = torch.ops.aten

# They say where in the memory of their source they read, whatever that is a view of.
ADDRESSES: Final = frozenset(
    {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
)


class Sharing:
    """Groups of nodes that may share memory: views with what they are views of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._leaders: dict[fx.Node, fx.Node] = {}
        self._held: set[fx.Node] = set()  # leaders of groups with an input
        self._returned: set[fx.Node] = set()  # leaders of groups that the caller gets
        self._written: set[fx.Node] = set()  # leaders of groups that are written to
        self._addressed: set[fx.Node] = set()  # leaders of groups that ADDRESSES read
        self._last: fx.Node | None = None  # of the forward, where a backward follows
        for node in graph.nodes:
            self._add(node)
            if node.meta.get("in_forward"):
                self._last = node

    def _add(self, node: fx.Node) -> None:
        if node.target in ADDRESSES:
            self._addressed.add(self._leader(node.args[0]))
        if node.op == "output":
            self._returned.update(map(self._leader, node.all_input_nodes))
        elif node.op != "call_function":
            self._held.add(self._leader(node))
        elif node.target is aten.copy_.default:
            self._merge(node, node.args[0])
            self._written.add(self._leader(node))
        elif not is_fresh(node.target):
            for source in node.all_input_nodes:
                self._merge(node, source)
            if is_mutable_op(node.target):
                self._written.add(self._leader(node))

    def _leader(self, node: fx.Node) -> fx.Node:
        path = []
        while (above := self._leaders.get(node, node)) is not node:
            path.append(node)
            node = above
        for below in path:
            self._leaders[below] = node
        return node

    def _merge(self, one: fx.Node, other: Any) -> None:
        if not isinstance(one.meta.get("val"), torch.Tensor | tuple | list | None):
            return  # a number
        if not isinstance(other.meta.get("val"), torch.Tensor | tuple | list | None):
            return
        old, new = self._leader(one), self._leader(other)
        if old is new:
            return
        self._leaders[old] = new
        for known in (self._held, self._returned, self._written, self._addressed):
            if old in known:
                known.add(new)

    def memory(self, node: fx.Node) -> fx.Node:
        """One and the same node for all that may lie in the node's memory."""
        return self._leader(node)

    def is_written(self, node: fx.Node) -> bool:
        """Whether something writes to the node's memory."""
        return self._leader(node) in self._written

    def is_returned(self, node: fx.Node) -> bool:
        """Whether the caller gets the node's memory, as a view of it perhaps."""
        return self._leader(node) in self._returned

    def is_visible(self, node: fx.Node) -> bool:
        """Whether the caller holds the node's memory: it is an input's, or it is returned."""
        return self._leader(node) in self._held or self.is_returned(node)

    def why_not_merge(self, copy: fx.Node, source: fx.Node) -> str | None:
        """None if readers of `copy`, which has memory of its own, may read `source` instead."""
        if self.is_returned(copy):
            return "the caller gets it"
        if self.is_written(copy) or self.is_written(source):
            return "it is written to"
        if self._leader(copy) in self._addressed:
            return "its memory is read by addresses, which another memory has not"
        if self.is_visible(source) and self._is_saved(copy):
            return "the backward reads it, and until then the caller may write to its source"
        return None

    def _is_saved(self, node: fx.Node) -> bool:
        """Whether a value of the forward is read, as a view of it perhaps, by the backward."""
        last = self._last
        if last is None or last < node:
            return False
        leader, todo, seen = self._leader(node), [node], {node}
        while todo:
            for user in todo.pop().users:
                if last < user and user.op != "output" and not is_input_update(user):
                    return True
                if user not in seen and self._leader(user) is leader:
                    seen.add(user)
                    todo.append(user)
        return False

    def merge(self, copy: fx.Node, source: fx.Node) -> None:
        """Note that readers of `copy` read `source` now."""
        self._merge(copy, source)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Note that readers of `old` read `new` now, which has memory of its own too."""
        self._leaders[new] = self._leader(old)


@cache
def is_fresh(target: Any) -> bool:
    """Whether results have memory of their own."""
    return keeps_nothing(target)


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a node that writes may write to."""
    if node.target is aten.copy_.default:
        return [node.args[0]]
    return list(node.all_input_nodes)


def is_returned(node: fx.Node) -> bool:
    """Whether the caller gets this very value."""
    return any(user.op == "output" for user in node.users)
