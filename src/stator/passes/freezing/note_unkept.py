"""What is made of weights alone and stays in the program all the same: said, with the reason."""

from __future__ import annotations

from torch import fx

from stator.graph.edit import is_effect
from stator.graph.run import Ctx
from stator.passes.freezing.take_constants import constant_nodes
from stator.torch_api import is_mutable_op, is_random_op


def note_unkept(graph: fx.Graph, ctx: Ctx) -> None:
    """Note each call that could have been a constant, but for one reason; not what follows it."""
    settled = constant_nodes(graph)
    fixed = set(settled)  # and what else nobody changes
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or node in settled or not fixed.issuperset(sources):
            continue
        if is_effect(node) or is_mutable_op(node.target) or is_random_op(node.target):
            continue  # nobody would expect it to be one
        fixed.add(node)
        is_first = any(one in settled for one in sources)
        if is_first and not all(one.op == "output" for one in node.users):
            ctx.record.notes.append(f"{node.name} is computed at every call: {_why(node, settled)}")


def _why(node: fx.Node, settled: dict[fx.Node, None]) -> str:
    made = next((one for one in node.all_input_nodes if one not in settled), None)
    if made is not None:
        return f"it reads {made.name}, which is made of no weight"
    if any(user.op == "output" for user in node.users):
        return "the caller gets it, and may write to it"
    return "what it makes is much larger than its weights"
