"""What depends on weights alone leaves the graph: the program reads it as a constant."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from stator.graph.edit import WEIGHT, drop_unread, is_effect, needed_by
from stator.graph.recipe import Constants, Do, Made, Recipe, Weight
from stator.ops.packs import PACKS
from stator.ops.quantize import DEQUANTIZERS
from stator.ops.writes import written
from stator.torch_api import (
    OpOverload,
    is_mutable_op,
    is_random_op,
    is_view_op,
    keeps_nothing,
)

GROWTH: Final = 2  # times the bytes of its weights that a constant may take, beyond
SPARE: Final = 1 << 20  # so many


def take_constants(graph: fx.Graph, *, frozen: bool, discards: bool = False) -> Constants:
    """Replace what can be made of weights once by further inputs; return how it is made.

    `frozen`: all of it, the weights themselves included.  Otherwise what is packed alone.
    `discards`: weights are given back when it is made.

    before: graph(x, w, b):      p = pack(w);  y = linear(x, p, b)
    after:  graph(x, b, pack):   y = linear(x, pack, b)            pack = recipe of w
    """
    inputs = graph.find_nodes(op="placeholder")
    position = {node: number for number, node in enumerate(inputs)}
    settled = constant_nodes(graph)
    if frozen:
        wanted = [node for node in settled if any(user not in settled for user in node.users)]
    else:
        wanted = [node for node in settled if node.target in PACKS]
    recipes = []
    last = inputs[-1] if inputs else None
    for node in wanted:
        recipes.append(_recipe(node, position))
        with graph.inserting_after(last):
            constant = graph.placeholder(f"{node.name}_constant")
        constant.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
        readers = [user for user in node.users if user not in settled] if frozen else None
        node.replace_all_uses_with(
            constant, delete_user_cb=lambda user, only=readers: only is None or user in only
        )
        last = constant
    drop_unread(graph)
    constants = Constants(tuple(recipes), tuple(range(len(inputs))), frozen, discards)
    if not constants.are_needed:
        return constants  # the program is given all inputs, whether it reads them or not
    kept = [node for node in inputs if node.users or WEIGHT not in node.meta]
    for node in set(inputs) - set(kept):
        graph.erase_node(node)
    return replace(constants, arguments=tuple(position[node] for node in kept))


def constant_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Weights and all that is computed of them alone, in order; nobody else may write to it."""
    exposed = _exposed(graph)
    settled: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_constant = bool(node.meta.get(WEIGHT)) and not _is_written(node)
        else:
            is_constant = node.op == "call_function" and _is_settled(node, settled)
        if is_constant and node not in exposed:
            settled[node] = None
    return settled


def _exposed(graph: fx.Graph) -> set[fx.Node]:
    """What the caller gets or an operator writes to, and all that may lie in the same memory.

    A weight is not, through a view: who writes to a view of it writes to the weight.
    """
    found = set(graph.output_node().all_input_nodes)
    for node in graph.find_nodes(op="call_function", target=written):
        _, copied = node.args
        bases = enumerate(node.kwargs.get("_all_bases", ()))
        found |= {base for index, base in bases if base is not None and index not in copied}
    stack = list(found)
    while stack:
        node = stack.pop()
        if _may_return_an_argument(node):
            sources = {source for source in node.all_input_nodes if source.op != "placeholder"}
            stack += sources - found
            found |= sources
    return found


def _may_return_an_argument(node: fx.Node) -> bool:
    """Whether its result may lie in the memory of what it takes."""
    if isinstance(node.target, OpOverload):
        return not keeps_nothing(node.target)
    return node.target in (operator.getitem, written)


def _is_written(weight: fx.Node) -> bool:
    """Whether somebody writes to it."""
    return any(is_mutable_op(user.target) for user in weight.users)


def _is_settled(node: fx.Node, settled: Iterable[fx.Node]) -> bool:
    """Whether a call depends on weights alone, and its result is worth keeping."""
    sources = node.all_input_nodes
    if not sources or any(source not in settled for source in sources) or is_effect(node):
        return False
    if is_mutable_op(node.target) or is_random_op(node.target):
        return False
    if node.target is operator.getitem or node.target in PACKS or is_view_op(node.target):
        return True
    if node.target in DEQUANTIZERS:
        return True  # to be done once, however large: what computes with integers has them by now
    return not is_too_large(node)


def is_too_large(node: fx.Node) -> bool:
    """Whether a constant takes much more memory than the weights that it is made of."""
    if _bytes(node) <= SPARE:  # without looking for them: most are
        return False
    behind = (n for n in needed_by([node]) if n.op == "placeholder")
    return _bytes(node) > GROWTH * sum(map(_bytes, behind)) + SPARE


def _bytes(node: fx.Node) -> int:
    tensors = node.meta.get("val")
    tensors = tensors if isinstance(tensors, tuple | list) else [tensors]
    return sum(t.numel() * t.dtype.itemsize for t in tensors if isinstance(t, torch.Tensor))


def _recipe(node: fx.Node, position: dict[fx.Node, int]) -> Recipe:
    needed = needed_by([node])
    order = [other for other in node.graph.nodes if other in needed]
    weights = [other for other in order if other.op == "placeholder"]
    names: dict[fx.Node, Any] = {other: Weight(n) for n, other in enumerate(weights)}
    steps: list[Do] = []
    for other in order:
        if other.op != "placeholder":
            args, kwargs = map_arg((other.args, dict(other.kwargs)), names.__getitem__)
            names[other] = Made(len(steps))
            steps.append(Do(other.target, tuple(args), dict(kwargs)))
    return Recipe(tuple(position[weight] for weight in weights), tuple(steps))
