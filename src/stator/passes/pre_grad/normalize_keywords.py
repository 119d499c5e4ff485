"""One name for each argument: torch's own, where NumPy's was given."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import fx

from stator.graph.run import Ctx

NUMPY: Final = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}
FIRST: Final = ("x", "a", "x1")  # names of the first argument, if it is not given by position


def normalize_keywords(graph: fx.Graph, ctx: Ctx) -> int:
    """Rename NumPy's keywords in calls of torch's functions and methods; return how many calls.

    before: y = torch.sum(a=x, axis=1, keepdims=True)
    after:  y = torch.sum(input=x, dim=1, keepdim=True)
    """
    renamed = 0
    for node in graph.nodes:
        if not node.kwargs or not _is_torchs(node):
            continue
        names = {name: _renamed(name, node) for name in node.kwargs}
        clash = len(set(names.values())) != len(names)
        changed = any(old != new for old, new in names.items())
        if clash or not changed or not ctx.fuel.spend(f"normalize_keywords: {node.name}"):
            continue
        node.kwargs = {names[name]: value for name, value in node.kwargs.items()}
        renamed += 1
    return renamed


def _is_torchs(node: fx.Node) -> bool:
    """Whether torch itself reads the arguments: its functions know both names."""
    if node.op == "call_method":
        return True
    home = getattr(node.target, "__module__", None) or ""
    is_builtin = type(node.target).__name__ == "builtin_function_or_method"
    return node.op == "call_function" and is_builtin and home.startswith("torch")


def _renamed(name: str, node: fx.Node) -> str:
    if name in _own_names(node.target if isinstance(node.target, str) else node.target.__name__):
        return name
    if name in FIRST and not node.args:
        return "input"
    return NUMPY.get(name, name)


@cache
def _own_names(operator: str) -> frozenset[str]:
    """What torch itself calls the operator's arguments: a few are an `axis` or an `x` there."""
    packet = getattr(torch.ops.aten, operator, None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    taken = [one._schema.arguments for one in overloads]
    of_tensors = [args for args in taken if any("Tensor" in str(arg.type) for arg in args)]
    return frozenset(argument.name for arguments in of_tensors for argument in arguments)
