"""A graph with inputs to run it on, and parts of it.

Everything that makes a graph smaller by structure is one operation: take some values as outputs,
some as inputs, and what lies between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stator.graph.capture import attribute_tensors
from stator.torch_api import LazyGraphModule, OpOverload, is_mutable_op

Lookup = Callable[[fx.Node], Any]  # a node's recorded value; KeyError if there is none


@dataclass(frozen=True, slots=True)
class Case:
    """A graph whose tensors are all inputs, and a value for each of them."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def graph(self) -> fx.Graph:
        """The graph; its output is a flat tuple of nodes."""
        return self.module.graph

    @property
    def calls(self) -> list[fx.Node]:
        """The nodes that compute something, which are those that count."""
        return [node for node in self.graph.nodes if is_call(node)]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs' nodes."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes that are returned."""
        returned: tuple[fx.Node, ...] = self.graph.output_node().args[0]
        return returned

    @property
    def cost(self) -> tuple[int, int, int]:
        """What is made smaller, what matters most first."""
        return len(self.calls), len(self.outputs), len(self.inputs)


def is_call(node: fx.Node) -> bool:
    """Whether a node computes something."""
    return node.op in ("call_function", "call_method", "call_module")


def case_of(module: fx.GraphModule, inputs: Sequence[Any]) -> Case:
    """A graph as a case: tensors that it holds become inputs, constants are not returned."""
    held = attribute_tensors(module)
    graph, values, made = fx.Graph(), list(inputs), {}
    nodes = list(module.graph.nodes)
    first = [node for node in nodes if node.op == "placeholder"]
    lifted = {n: held[n.target] for n in nodes if n.op == "get_attr" and n.target in held}
    for node in (*first, *lifted):
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in nodes:
        if node.op == "output":
            graph.output(tuple(made[source] for source in node.all_input_nodes))
        elif node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    values += lifted.values()
    return Case(as_module(module, graph), tuple(values))


def as_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph; it has no code before somebody asks for it."""
    module: fx.GraphModule = LazyGraphModule(root, graph, "Graph")
    return module


def extract(
    case: Case, outputs: Iterable[fx.Node], leaves: Iterable[fx.Node], value_of: Lookup
) -> Case | None:
    """What computes `outputs` from the inputs and from `leaves`, whose values are then inputs.

    None if nothing would be left to compute.
    """
    cut = set(_with_parts(leaves, value_of))
    wanted = [node for node in outputs if node.op != "placeholder" and node not in cut]
    needed = _needed(wanted, cut)
    graph, made = fx.Graph(), {}
    values: list[Any] = []
    known = dict(zip(case.placeholders, case.inputs, strict=True))
    for node in case.graph.nodes:
        if node in needed and (node in known or node in cut):
            made[node] = graph.placeholder(node.name)
            values.append(known[node] if node in known else value_of(node))
    for node in case.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in wanted))
    return Case(as_module(case.module, graph), tuple(values)) if wanted else None


def _with_parts(leaves: Iterable[fx.Node], value_of: Lookup) -> Iterable[fx.Node]:
    """Leaves that can be inputs; of one that is several tensors, the parts that are read."""
    for node in leaves:
        if can_be_input(node, value_of):
            yield node
        elif all(user.target is operator.getitem for user in node.users):
            yield from (user for user in node.users if can_be_input(user, value_of))


def can_be_input(node: fx.Node, value_of: Lookup) -> bool:
    """Whether a node's value is a tensor or a number."""
    try:
        return isinstance(value_of(node), torch.Tensor | int | float)
    except KeyError:
        return False


def _needed(outputs: Iterable[fx.Node], leaves: set[fx.Node]) -> set[fx.Node]:
    """The nodes that outputs come from, with those that write to any of them."""
    needed: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        todo += [user for user in node.users if is_writer(user)]
        if node not in leaves:
            todo += node.all_input_nodes
    return needed


def is_writer(node: fx.Node) -> bool:
    """Whether a node changes one of its arguments."""
    if isinstance(node.target, OpOverload):
        return is_mutable_op(node.target)
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if getattr(node.target, "__module__", "") == "_operator":
            return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
    else:
        return False
    return name.endswith("_") and not name.endswith("__")
