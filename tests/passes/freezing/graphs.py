"""Graphs some of whose inputs are weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from stator.graph.edit import WEIGHT
from stator.graph.recipe import Constants
from stator.graph.run import Ctx, GraphPass, run_passes
from stator.passes.freezing.take_constants import take_constants
from stator.patterns import fwd_only


def with_weights(
    fn: Callable[..., Any], arguments: tuple[Tensor, ...], weights: tuple[int, ...]
) -> fx.GraphModule:
    """The operators that `fn` calls, the arguments at `weights` being some."""
    module = fwd_only(fn, arguments)
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if number in weights:
            node.meta[WEIGHT] = True
    return module


def rewritten(
    fn: Callable[..., Any],
    arguments: tuple[Tensor, ...],
    weights: tuple[int, ...],
    *passes: GraphPass,
) -> tuple[fx.GraphModule, Ctx]:
    """The graph after passes, and what they noted."""
    module, ctx = with_weights(fn, arguments, weights), Ctx()
    run_passes(passes, module.graph, ctx, "forward")
    return module, ctx


def run_with_constants(
    module: fx.GraphModule, arguments: tuple[Tensor, ...], *, frozen: bool = True
) -> tuple[Any, Constants]:
    """What the graph computes once its constants are taken out and made."""
    constants = take_constants(module.graph, frozen=frozen)
    made = [r.make([arguments[i] for i in r.weights]) for r in constants.recipes]
    module.graph.lint()
    module.recompile()
    with torch.no_grad():
        return module(*(arguments[i] for i in constants.arguments), *made), constants
