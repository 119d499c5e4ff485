"""Which operators have a kernel that gives eager's own bits."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import from_torch
from stator.ops import table
from stator.ops.table import Exact
from stator.torch_api import pytree

# Of torch's kernels, those for which it was measured: they multiply and add in one step.  Of those
# for GPUs, nothing was.
MEASURED: Final = frozenset({"AVX2", "AVX512"})
MOVES: Final = frozenset({torch.ops.aten.clone.default})  # beside views: they compute nothing


def has_eager_bits(node: fx.Node) -> bool:
    """Whether a kernel for the node computes, bit for bit, what eager does on this processor."""
    said = table.EXACT.get(node.target, Exact.NOWHERE)
    is_moved = node.target in table.VIEW_RULES
    if not is_moved and torch.backends.cpu.get_cpu_capability() not in MEASURED:
        return False
    values: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
    leaves = pytree.tree_leaves([*values, node.meta.get("val")])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return is_moved or node.target in MOVES
    found = [from_torch(tensor.dtype) for tensor in tensors]
    dtypes = [dtype for dtype in found if dtype is not None]
    return (
        said.holds(dtypes) if isinstance(said, Exact) else said(dtypes, *node.args, **node.kwargs)
    )
