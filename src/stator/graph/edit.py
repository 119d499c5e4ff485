"""Small edits that several stages need."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Final

import torch
from torch import fx

from stator.torch_api import OpOverload, is_random_op, returns_of

aten = torch.ops.aten

# Notes on nodes.
CALLERS: Final = "callers"  # an input that the caller holds anyway; it outlives the call
DONATED: Final = "donated"  # an input that is nobody's but the call's: it may be stored over
EXTRAS: Final = "extras"  # on an output: what the backward calls the last values that it returns
PART: Final = "part"  # an input that is one of several results of a library call
KEPT: Final = "kept"  # computed to be kept for a while, in the place of what it is computed from
EARLY: Final = "early"  # computed for a first time, to be forgotten and computed again later
AGAIN: Final = "again"  # a library's call in the backward that the forward made too

WEIGHT: Final = "weight"  # an input that stays the same from call to call, unless somebody writes
VALUE: Final = "value"  # on a weight: a weak reference to its tensor, if that is known by now

# They return a value for others to depend on, and check all the same if none does.
ASSERTIONS: Final = frozenset(
    {aten._functional_assert_async.msg, aten._functional_assert_scalar.default}
)


def mark_donated(graph: fx.Graph, count: int) -> None:
    """Note on the first inputs of a backward, saved values, which are there for it alone."""
    for node in graph.find_nodes(op="placeholder")[:count]:
        node.meta[DONATED] = node.meta.get(CALLERS) is False


def is_effect(node: fx.Node) -> bool:
    """Whether the node must run even if nobody reads its result."""
    if node.op != "call_function":
        return False
    if node.meta.get("effect"):
        return True
    target = node.target
    if isinstance(target, OpOverload) and target.namespace in ("aten", "prims"):
        return _has_effect(target)
    return returns_of(target) == 0 or node.is_impure()


@cache  # every pass asks, of all nodes
def _has_effect(target: OpOverload) -> bool:
    """Whether calls of an operator of torch's are effects, whatever they are given."""
    without_result = returns_of(target) == 0  # run for what it does: an assertion, a print
    is_impure = fx.Graph().call_function(target).is_impure()
    return bool(without_result or target in ASSERTIONS or is_impure)


def draws_numbers(node: fx.Node) -> bool:
    """Whether the node draws random numbers; an attention without dropout is told not to."""
    return is_random_op(node.target) and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name == "dropout_p":
            return bool(given == 0)
    probability = node.kwargs.get("dropout_p", 0)
    return bool(probability == 0) and "scaled_dot_product" in str(node.target)


def spread_lines(graph: fx.Graph) -> None:
    """Give nodes that passes made the user's line of what they read, else of who reads them."""
    bare = [
        node
        for node in graph.nodes
        if node.op == "call_function" and not node.meta.get("stack_trace")
    ]
    for node in bare:  # in order: lines go from one to the next
        _take_line(node, node.all_input_nodes)
    for node in reversed(bare):
        _take_line(node, node.users)


def _take_line(node: fx.Node, others: Iterable[fx.Node]) -> None:
    if not node.meta.get("stack_trace"):
        traces = (other.meta.get("stack_trace") for other in others if other.op != "placeholder")
        if (found := next(filter(None, traces), None)) is not None:
            node.meta["stack_trace"] = found


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nobody reads; effects, inputs and the output stay."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not is_effect(node):
            graph.erase_node(node)


def needed_by(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """`roots` and all that they are computed from."""
    needed: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


def reached_from(roots: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """`roots` and all that is computed from them."""
    reached = set(roots)
    for node in graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached
