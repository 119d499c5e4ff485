"""Effect tokens: needed to trace effects in order, not to run them in order."""

from __future__ import annotations

import operator

from torch import fx

from stator.torch_api import returns_of, with_effects


def strip_tokens(graph: fx.Graph) -> int:
    """Call effectful operators directly; return how many there were.

    before: (token_1, y) = with_effects(token, op, x)
    after:  y = op(x)

    The executor keeps the order of a graph, so the thread of tokens has nothing left to say.
    """
    found = [node for node in graph.nodes if node.target is with_effects]
    for node in found:
        _, target, *arguments = node.args
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(arguments), node.kwargs)
        call.meta = {k: v for k, v in node.meta.items() if k != "val"}
        call.meta["effect"] = True
        value = node.meta.get("val")
        if value is not None:
            call.meta["val"] = value[1] if returns_of(target) == 1 else tuple(value[1:])
        _redirect_items(graph, node, call, single=returns_of(target) <= 1)
    for node in reversed(list(graph.nodes)):  # tokens die from the last to the first
        if (node.target is with_effects or _is_token(node)) and not node.users:
            graph.erase_node(node)
    return len(found)


def _redirect_items(graph: fx.Graph, node: fx.Node, call: fx.Node, *, single: bool) -> None:
    for item in list(node.users):
        if item.target is not operator.getitem or item.args[1] == 0:
            continue
        if single:
            item.replace_all_uses_with(call)
            graph.erase_node(item)
        else:
            item.args = (call, int(item.args[1]) - 1)


def _is_token(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return "token" in node.name
    return node.target is operator.getitem and (
        isinstance(node.args[0], fx.Node)
        and node.args[0].target is with_effects
        and node.args[1] == 0
    )
