"""Equal calls of the forward are one before the cut: the backward gets one value, not two."""

from __future__ import annotations

from torch import fx

from stator.graph.run import Ctx
from stator.graph.sharing import Sharing
from stator.passes.post_grad.share_subexpressions import share_calls, why_not_share


def share_forward(graph: fx.Graph, ctx: Ctx) -> int:
    """Let readers of a call that the forward made before read the first; return how many are gone.

    before: y = x @ w;  z = x @ w;  u = sin(y) + exp(z)
    after:  y = x @ w;  u = sin(y) + exp(y)
    """
    if all(_is_forward(node) for node in graph.nodes if node.op == "call_function"):
        return 0  # nothing is kept: each half is looked through anyway
    return share_calls(graph, ctx, "share_forward", _why_not)


def _why_not(first: fx.Node, second: fx.Node, sharing: Sharing) -> str | None:
    if not (_is_forward(first) and _is_forward(second)):
        return "the backward may compute it again"
    if _region(first) != _region(second):
        return "one is in a checkpointed region that the other is not in"
    if sharing.is_returned(first) or sharing.is_returned(second):
        return "the caller may write to it before the backward reads it"
    return why_not_share(first, second, sharing)


def _is_forward(node: fx.Node) -> bool:
    return bool(node.meta.get("in_forward"))


def _region(node: fx.Node) -> tuple[object, object]:
    return (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
