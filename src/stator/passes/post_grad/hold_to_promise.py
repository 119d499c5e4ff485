"""Operators of users' are held to what their fake implementations said.

Kernels are made for the sizes that were foretold: of a smaller result they would read too much.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.promises import as_promised
from stator.torch_api import OpOverload

TORCHS: Final = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "mkldnn",
        "mkl",
        "inductor",
        "profiler",
        "quantized",
        "quantized_decomposed",
        "onednn",
    }
)


def hold_to_promise(graph: fx.Graph, ctx: Ctx) -> int:
    """Check the sizes of tensors that operators of users' return; return how many.

    before: y = mylib.op(x);  z = sin(y)                                     y: f32[4, 8]
    after:  y = mylib.op(x);  p = as_promised(y, [4, 8], "mylib.op");  z = sin(p)
    """
    held = 0
    for node in list(graph.nodes):
        if not _is_of_users(node.target):
            continue
        single = isinstance(node.meta.get("val"), torch.Tensor)
        for result in [node] if single else list(node.users):
            if result is node or result.op == "call_function":
                held += _hold(result, str(node.target))
    return held


def _is_of_users(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace not in TORCHS


def _hold(result: fx.Node, operator: str) -> bool:
    value = result.meta.get("val")
    readers = [user for user in result.users if user.op != "output"]
    if not isinstance(value, torch.Tensor) or not readers:
        return False
    sizes = [size if isinstance(size, int) else None for size in value.size()]
    with result.graph.inserting_after(result):
        checked = result.graph.call_function(as_promised, (result, sizes, operator))
    checked.meta = dict(result.meta)
    for reader in readers:
        reader.replace_input_with(result, checked)
    return True
