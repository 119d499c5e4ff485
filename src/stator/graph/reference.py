"""A graph run twice, side by side: as eager does, and in float64 as the measure of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from stator.ops import draws
from stator.torch_api import is_random_op, pytree

_WIDE: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
# What they return depends on how numbers are written, so they run on eager's own.
_BITWISE: Final = frozenset(
    {torch.ops.aten.view.dtype, draws.uniform, draws.normal, draws.coins, draws.integers}
)


class SideBySide(fx.Interpreter):
    """Runs nodes in eager; `exact` has the float64 twin of each value.

    Random numbers are eager's in both.  So is what cannot run in float64.
    """

    def __init__(self, module: torch.nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.exact: dict[fx.Node, Any] = {}

    def run_between(self, known: Mapping[fx.Node, Any], nodes: Iterable[fx.Node]) -> None:
        """Run `nodes`, which come in the graph's order, from values that are known."""
        for node, value in known.items():
            self.env[node] = value
            self.exact[node] = widened(value)
        for node in nodes:
            self.env[node] = self.run_node(node)

    def run_node(self, n: fx.Node) -> Any:
        """The node's value in eager; its twin is put down beside it."""
        # Before: an operator may write to its arguments.
        given = fx.map_arg((n.args, dict(n.kwargs)), lambda source: self.exact[source])
        result = super().run_node(n)
        self.exact[n] = self._twin(n, given, result)
        return result

    def _twin(self, node: fx.Node, given: Any, eager: Any) -> Any:
        if node.op != "call_function" or is_random_op(node.target) or node.target in _BITWISE:
            return widened(eager)
        args, kwargs = fx.node.map_aggregate(given, _wide_type)
        try:
            twin = widened(node.target(*args, **kwargs))
        except Exception:  # an operator of single precision alone, or of packed weights
            return widened(eager)
        return twin if _is_twin(twin, eager) else widened(eager)


def widened(value: Any) -> Any:
    """Tensors of floats in float64; others are copied."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_mkldnn:
            return tensor
        return tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype), copy=True)

    return pytree.tree_map_only(torch.Tensor, wide, value)


def _wide_type(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_twin(twin: Any, eager: Any) -> bool:
    """Whether both have the same shapes: an operator may take another way in float64."""
    one, other = pytree.tree_leaves(twin), pytree.tree_leaves(eager)
    return len(one) == len(other) and all(
        getattr(left, "shape", None) == getattr(right, "shape", None)
        for left, right in zip(one, other, strict=True)
    )
