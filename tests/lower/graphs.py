"""Graphs to lower: traced from functions, with sizes as numbers or as symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stator.lower.lower import Lowering
from stator.lower.sizes import Sizes


def traced(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> fx.GraphModule:
    """The operators that `fn` calls."""
    module: fx.GraphModule = make_fx(fn, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    return module


def lowered(fn: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> Lowering:
    """`fn` as loops."""
    lowering = Lowering(traced(fn, *inputs, symbolic=symbolic))
    lowering.run()
    return lowering


def placeholders(*inputs: Any) -> list[fx.Node]:
    """Inputs of a graph with symbolic sizes."""

    def first(*given: Any) -> Any:
        return given[0]

    return list(traced(first, *inputs, symbolic=True).graph.find_nodes(op="placeholder"))


def known_sizes(*inputs: Any) -> tuple[Sizes, list[Any]]:
    """Sizes that know the symbols of `inputs`, and the inputs as the graph sees them."""
    sizes, nodes = Sizes(), placeholders(*inputs)
    for node in nodes:
        sizes.learn(node)
    return sizes, [node.meta["val"] for node in nodes]


def fake(tensor: Tensor) -> Tensor:
    """The tensor as a graph sees it, its sizes as numbers."""
    (node,) = traced(lambda x: x.clone(), tensor).graph.find_nodes(op="placeholder")
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), "an input of a graph has a value"
    return value
