"""Masks that are written out and leave everything: attention goes without them."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from stator.graph.run import Ctx
from stator.passes.joint.fold_uniform import fold_uniform
from stator.torch_api import FakeTensorMode
from tests.passes.on_cuda import graph_of

aten = torch.ops.aten


def bias_of(start: int, limit: int, length: int) -> Tensor:
    """Nothing where numbers from `start` on reach `limit`, in rows of whole sixteens."""
    seen = torch.arange(start, start + length) >= limit
    mask = seen[None, None, :, None].expand(2, 1, length, length)
    nothing = torch.zeros([], dtype=torch.bfloat16)
    rows = torch.where(mask, nothing, float("-inf"))
    padded = torch.nn.functional.pad(rows, (0, -length % 16)).contiguous()[..., :length]
    return padded.expand(2, 3, length, length)


def attention(start: int, limit: int, length: int = 16) -> fx.Node:
    """The attention of a graph, behind the pass."""

    def program(q: Tensor) -> Tensor:
        attend = aten._scaled_dot_product_efficient_attention.default
        result: Tensor = attend(q, q, q, bias_of(start, limit, length), False)[0]
        return result

    with FakeTensorMode():
        q = torch.empty(2, 3, length, 8, dtype=torch.bfloat16)
    module = graph_of(program, q)
    fold_uniform(module.graph, Ctx())
    (node,) = module.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_efficient_attention.default
    )
    return node


def test_counts_are_at_least_0() -> None:
    assert attention(0, 0).args[3] is None


def test_rows_that_were_padded_for_the_kernel() -> None:
    assert attention(0, 0, length=13).args[3] is None


def test_a_mask_that_hides_something_stays() -> None:
    assert attention(0, 1).args[3] is not None
    assert attention(-1, 0).args[3] is not None
