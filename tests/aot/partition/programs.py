"""Small programs, traced, and their halves run as they are: no pass, no wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from stator.aot.metadata import Kept
from stator.aot.partition.choose import Wish, choose
from stator.aot.partition.split import Split
from stator.aot.partition.split import split as split_by
from stator.aot.trace import Traced, trace

Flat = Callable[..., Sequence[Any]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def traced(fn: Flat, *inputs: Any, symbolic: bool = False) -> Traced:
    """The joint graph of `fn` on tensors like `inputs`."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    fakes = [mode.from_tensor(value, static_shapes=not symbolic) for value in inputs]
    return trace(fn, fakes, mode)


def split(joint: Traced) -> Split:
    """Cut where eager would: all is saved but views and what is asked for again."""
    return split_by(joint, lambda facts, classes, _: choose(facts, classes, Wish(kernels=False)))


def targets(nodes: Iterable[fx.Node]) -> list[str]:
    """Names of the operators called, in order."""
    return [node.target.__name__ for node in nodes if node.op == "call_function"]


def called(module: fx.GraphModule | None) -> list[str]:
    """Names of the operators that a half calls, in order."""
    assert module is not None, "there is a backward"
    return targets(module.graph.nodes)


def checkpointed(found: Traced, names: Iterable[str], policy: CheckpointPolicy) -> None:
    """Tag forward calls of the operators in `names` as one checkpointed region."""
    for node in found.module.graph.nodes:
        if node.meta.get("in_forward") and targets([node]) and targets([node])[0] in names:
            node.meta |= {"recompute": policy, "ac_graph_id": 1}


def run_halves(halves: Split, inputs: Sequence[Any], tangents: Sequence[Tensor]) -> Any:
    """Values of the forward and gradients of the backward, the saved values between them."""
    assert halves.backward is not None, "there is a backward"
    extras = sum(saved.kept is Kept.EXTRA for saved in halves.saved)
    with torch.no_grad():
        returned = list(halves.forward(*inputs))
        values = returned[: len(returned) - extras]
        places = {Kept.PRIMAL: inputs, Kept.VALUE: values, Kept.EXTRA: returned[len(values) :]}
        saved = [places[found.kept][found.index] for found in halves.saved]
        return values, list(halves.backward(*saved, *tangents))
