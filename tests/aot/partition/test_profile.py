"""Calls that are measured where they run."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from stator.aot.partition.profile import kind_of, made_up, measured
from stator.torch_api import FakeTensorMode

aten = torch.ops.aten


def measured_targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in measured(graph.nodes)]


def test_a_size_that_varies_stays_free() -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    x, w = mode.from_tensor(torch.ones(5, 8)), mode.from_tensor(torch.ones(8, 8))
    graph = make_fx(torch.mm)(x, w).graph
    before = len(shapes.guards)

    assert measured_targets(graph) == [aten.mm.default]
    assert len(shapes.guards) == before


def test_a_size_that_data_decide_is_no_obstacle() -> None:
    def chosen(x: Tensor, w: Tensor) -> Tensor:
        return x[x[:, 0] > 0] @ w

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x, w = mode.from_tensor(torch.ones(5, 8)), mode.from_tensor(torch.ones(8, 8))
    graph = make_fx(chosen)(x, w).graph

    assert aten.mm.default in measured_targets(graph)


def test_a_number_that_varies_stays_free() -> None:
    shapes = ShapeEnv()
    source = ConstantSource("f")
    symbol = shapes.create_symbol(2.5, source, dynamic_dim=DimDynamic.DYNAMIC)
    number = shapes.create_symfloatnode(symbol, hint=2.5, source=source)
    node = fx.Graph().placeholder("f")
    node.meta["val"] = number

    assert made_up(number) == 2.5
    assert kind_of(node) == "2.5"
    assert not shapes.guards
