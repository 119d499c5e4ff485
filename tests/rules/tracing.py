"""Graphs for tests of rules and patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    """What `function` does with `tensors`, as operators; values are noted at the nodes."""
    return make_fx(function, tracing_mode="fake")(*tensors)


def targets(module: fx.GraphModule) -> list[str]:
    """What a graph calls, in order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
