"""Operators that write to their arguments do so, where nobody else reads what was there."""

from __future__ import annotations

from collections import Counter

from torch import fx

from stator.graph.run import Ctx
from stator.ops.writes import written
from stator.torch_api import auto_functionalized_v2, is_view_op


def write_in_place(graph: fx.Graph, ctx: Ctx) -> int:
    """Spare the copies that functionalization made of what nobody else reads; return how many.

    before: b = empty_like(x);  w = auto_functionalized_v2(mylib.norm, x=x, _all_bases=[b])
    after:  b = empty_like(x);  w = written(mylib.norm, [], x=x, _all_bases=[b])
    """
    spared = 0
    for node in graph.find_nodes(op="call_function", target=auto_functionalized_v2):
        bases = node.kwargs.get("_all_bases", [])
        counts = Counter(bases)
        copied = [
            index for index, base in enumerate(bases) if counts[base] > 1 or not _is_own(base, node)
        ]
        if len(copied) == len(bases) or not ctx.fuel.spend(f"write_in_place: {node.name}"):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(written, (*node.args, copied), dict(node.kwargs))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        spared += len(bases) - len(copied)
    return spared


def _is_own(base: fx.Node | None, node: fx.Node) -> bool:
    """Whether a tensor is made in the graph, and for this one call alone.

    With another reader the call would have to wait for it, which no edge of the graph says.
    """
    if base is None or base.op != "call_function" or is_view_op(base.target):
        return False
    return set(base.users) == {node} and sum(base is arg for arg in node.all_input_nodes) == 1
