"""Decompositions of matrices, without the vectors that nobody reads."""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch import fx

from stator.graph.run import Ctx

aten = torch.ops.aten

# Which results are vectors, and where the argument stands that asks for them.
VECTORS: Final = {
    aten._linalg_svd.default: (frozenset({0, 2}), 2, "compute_uv"),
    aten._linalg_eigh.default: (frozenset({1}), 2, "compute_v"),
}


def drop_vectors(graph: fx.Graph, ctx: Ctx) -> int:
    """Ask for singular values and eigenvalues alone where only they are read; return how many.

    before: d = _linalg_svd(x);  s = d[1]   where nobody reads d[0] or d[2]
    after:  d = _linalg_svd(x, False, False);  s = d[1]

    Eager asks for vectors where a gradient will need them; a trace always does.
    """
    dropped = 0
    for target, (vectors, place, name) in VECTORS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            parts = [user for user in node.users if user.target is operator.getitem]
            is_read = any(part.args[1] in vectors and part.users for part in parts)
            asked = node.args[place] if len(node.args) > place else node.kwargs.get(name, True)
            if is_read or len(parts) < len(node.users) or asked is not True:
                continue
            if not ctx.fuel.spend(f"drop_vectors: {node.name}"):
                continue
            if len(node.args) > place:
                node.update_arg(place, False)
            else:
                node.update_kwarg(name, False)
            dropped += 1
    return dropped
