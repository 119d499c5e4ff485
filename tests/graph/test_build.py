"""Nodes that rewrites add to a graph."""

from __future__ import annotations

import torch

from stator.graph.build import Builder
from stator.torch_api import FakeTensorMode, ShapeEnv, guard_count, make_fx

aten = torch.ops.aten


def test_sizes_that_vary_are_left_so_by_what_is_built_of_them() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(9, 5), static_shapes=False)
    graph = make_fx(torch.sin)(x).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    before = guard_count(mode)
    made = Builder(graph, graph.output_node()).run(
        lambda value: aten.constant_pad_nd.default(value, [0, 3]), node
    )

    assert all(isinstance(size, torch.SymInt) for size in made.meta["val"].size())
    assert guard_count(mode) == before
