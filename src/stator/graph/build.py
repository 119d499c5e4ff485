"""New nodes for a graph, written as plain Python: each knows its value as soon as it exists."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from stator.errors import CompileError
from stator.torch_api import FakeTensor, OpOverload, OpOverloadPacket, python_dispatcher, pytree

aten = torch.ops.aten

# Python's operators as a trace records them.
OPERATORS: Final[dict[Any, OpOverload]] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
    operator.matmul: aten.mm.default,
}


class Value(fx.Proxy):
    """A node to compute with; it answers questions about its value, which a trace would not."""

    @property
    def value(self) -> Any:
        """The node's fake value."""
        return self.tracer.builder.value_of(self.node)

    @property
    def shape(self) -> torch.Size:
        """Sizes, symbolic ones included."""
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.value.device

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return int(self.value.ndim)


@dataclass(slots=True)
class Builder:
    """Adds nodes to a graph, in front of `before`; takes them away again if asked.

    Of a function of both sides of an equation, `only_results` leaves what its results are made of:
    to compute the values of the others takes most of the time.
    """

    graph: fx.Graph
    before: fx.Node
    key: str = "val"  # where values are noted: Dynamo's graphs have "example_value"
    only_results: bool = False
    added: list[fx.Node] = field(default_factory=list)
    tracer: _Tracer = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = _Tracer(self)

    def value(self, node: fx.Node) -> Value:
        """A node that is there, to compute with."""
        return Value(node, self.tracer)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` makes of nodes and constants, as nodes and constants."""

        def wrapped(argument: Any) -> Any:
            return pytree.tree_map_only(fx.Node, self.value, argument)

        with self._fake_mode(args, kwargs), self.graph.inserting_before(self.before):
            result = function(*wrapped(args), **wrapped(kwargs))
            result = pytree.tree_map_only(fx.Proxy, lambda proxy: proxy.node, result)
            if self.only_results:
                self._leave_what_makes(result)
        return result

    def value_of(self, node: fx.Node) -> Any:
        """A node's value: computed now, if nobody has asked for it yet."""
        if self.key not in node.meta:
            node.meta[self.key] = self._computed(node)
        return node.meta[self.key]

    def _computed(self, node: fx.Node) -> Any:
        args, kwargs = pytree.tree_map_only(fx.Node, self.value_of, (node.args, node.kwargs))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), "a call"
        return node.target(*args, **kwargs)

    def _leave_what_makes(self, results: Any) -> None:
        """Compute values of results, and erase what has none."""
        added = set(self.added)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, fx.Node) and leaf in added:
                self.value_of(leaf)
        for node in reversed(self.added):
            if self.key not in node.meta:
                self.graph.erase_node(node)
        self.added = [node for node in self.added if not node._erased]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`, of which no argument need be a node."""

        def make(*args: Any, **kwargs: Any) -> fx.Proxy:
            return self.tracer.create_proxy("call_function", target, args, kwargs)

        made = self.run(make, *args, **kwargs)
        assert isinstance(made, fx.Node), "a call makes a node"
        return made

    def drop_unread(self) -> None:
        """Erase what was added and nobody reads."""
        for node in reversed(self.added):
            if not node.users:
                self.graph.erase_node(node)
        self.added = [node for node in self.added if not node._erased]

    def take_back(self) -> None:
        """Erase all that was added; nobody may read it yet."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
        self.added.clear()

    @contextmanager
    def _fake_mode(self, *arguments: Any) -> Iterator[None]:
        nodes = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]
        values = [node.meta.get(self.key) for node in (*nodes, self.before)]
        # Not the mode that Dynamo has now: values of its graphs are of the one it traced with.
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        mode = fakes[0].fake_mode if fakes else nullcontext()
        # Kernels of torch's that take plain numbers would settle sizes that vary.
        varies = any(isinstance(n, torch.SymInt) for value in fakes for n in value.size())
        with python_dispatcher(varies), mode, torch.no_grad():
            yield


class _Tracer(fx.proxy.GraphAppendingTracer):
    def __init__(self, builder: Builder) -> None:
        super().__init__(builder.graph)
        self.builder = builder

    def proxy(self, node: fx.Node) -> Value:
        return Value(node, self)

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        key = self.builder.key
        target = overload_of(target) if key == "val" else target
        node = super().create_node(kind, target, *rest, **named)
        self.builder.added.append(node)
        if not self.builder.only_results:
            self.builder.value_of(node)
        for kept in ("stack_trace", "recompute", "ac_graph_id", "partitioner_tag"):
            if kept in self.builder.before.meta:
                node.meta[kept] = self.builder.before.meta[kept]
        return node


def overload_of(target: Any) -> Any:
    """The overload that a call means: Python's operators and packets name a usual one."""
    if not isinstance(target, OpOverloadPacket):
        return OPERATORS.get(target, target)
    for name in ("default", "Tensor"):
        if name in target.overloads():
            return getattr(target, name)
    raise CompileError("rules", f"{target} has several overloads", hint="name one")
