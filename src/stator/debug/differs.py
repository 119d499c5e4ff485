"""Whether a compiler gets a graph wrong that eager gets right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stator.graph.closeness import worst_element
from stator.graph.reference import SideBySide
from stator.torch_api import pytree


def differs(
    fx_g: fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
) -> bool:
    """Whether compiling or running raises, or a result is further from the truth than eager's.

    A graph that fails in eager fails by itself: the compiler is not to blame.
    """
    eager, exact = _references(fx_g, inputs)
    try:
        results = compiler(fx_g, _copies(inputs))(_copies(inputs))
    except Exception:
        return True
    ours, theirs = pytree.tree_leaves(results), pytree.tree_leaves(eager)
    twins = pytree.tree_leaves(exact)
    if len(ours) != len(theirs):
        return True
    return any(map(_is_off, ours, theirs, twins))


def _references(fx_g: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, Any]:
    with torch.no_grad():
        beside = SideBySide(fx_g, fx_g.graph)
        eager = beside.run(*_copies(inputs))
    (output,) = fx_g.graph.find_nodes(op="output")
    return eager, fx.map_arg(output.args[0], lambda node: beside.exact[node])


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return list(pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), list(inputs)))


def _is_off(ours: Any, eager: Any, exact: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return bool(ours != eager)
    return worst_element(ours.detach(), eager.detach(), exact) is not None
