"""Statistics of norms: what fake tensors do not know of them, and what no gradient needs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

# Norms, and where their parameters stand among their arguments.  Their second and third result are
# statistics, which eager keeps in the type of the parameters; fake tensors have the input's.
_PARAMETERS: Final[Mapping[Any, slice]] = {
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
    aten._native_batch_norm_legit.no_stats: slice(1, 3),
    aten._native_batch_norm_legit_functional.default: slice(1, 5),
    aten._native_batch_norm_legit_no_training.default: slice(1, 5),
}
_HALVES: Final = (torch.bfloat16, torch.float16)
_RUNNING: Final = (3, 4)  # running statistics, among the arguments and among the results
_SAVED: Final = (5, 6)  # what native_batch_norm_backward takes of the forward's statistics
_TRAINING: Final = 7


def settle_statistics(graph: fx.Graph) -> None:
    """Give statistics the type that they will have; let go of those that evaluation never has."""
    for node in graph.nodes:
        if node.target in _PARAMETERS:
            _settle_forward(node)
        elif node.target is aten.native_group_norm_backward.default:
            _retype(node, (0,), node.args[1].meta["val"].dtype)
        elif node.target is aten.native_batch_norm_backward.default:
            _drop_unused(node)


def _drop_unused(node: fx.Node) -> None:
    """Evaluation takes the running statistics, and its forward saved empty tensors."""
    if len(node.args) > _TRAINING and not node.args[_TRAINING]:
        for position in _SAVED:
            node.update_arg(position, None)


def _settle_forward(node: fx.Node) -> None:
    given = node.args[0].meta["val"].dtype
    parameters = [arg for arg in node.args[_PARAMETERS[node.target]] if arg is not None]
    if given in _HALVES and any(p.meta["val"].dtype is torch.float32 for p in parameters):
        _retype(node, (1, 2), torch.float32)
    if node.target is aten._native_batch_norm_legit_functional.default:
        _retype(node, _RUNNING, node.args[_RUNNING[0]].meta["val"].dtype)


def _retype(node: fx.Node, positions: tuple[int, ...], dtype: torch.dtype) -> None:
    values = list(node.meta["val"])
    for position in positions:
        if values[position] is not None:
            values[position] = values[position].to(dtype)
    node.meta["val"] = tuple(values)
    for user in node.users:
        if user.target is operator.getitem and user.args[1] in positions:
            user.meta["val"] = values[user.args[1]]
