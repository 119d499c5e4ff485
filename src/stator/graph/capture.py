"""Graphs that Dynamo captured, as flat programs that can be traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stator.core.torch_types import Flat
from stator.torch_api import PropagateUnbackedSymInts


def attribute_tensors(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants that the graph reads from the module, by name."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, torch.Tensor):
            found[str(node.target)] = value
    return found


def graph_runner(module: fx.GraphModule, lifted: list[str]) -> Flat:
    """A program that runs the graph, taking the tensors named in `lifted` as further arguments."""

    def run(*arguments: Any) -> list[Any]:
        count = len(arguments) - len(lifted)
        runner = _Runner(module, dict(zip(lifted, arguments[count:], strict=True)))
        result = runner.run(*arguments[:count])
        return list(result) if isinstance(result, tuple | list) else [result]

    return run


class _Runner(PropagateUnbackedSymInts):
    """Interpreter in which lifted attributes are arguments."""

    def __init__(self, module: fx.GraphModule, lifted: dict[str, Any]) -> None:
        super().__init__(module)
        self.lifted = lifted

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The argument that stands for the attribute, or the attribute."""
        if target in self.lifted:
            return self.lifted[target]
        return super().get_attr(target, args, kwargs)
