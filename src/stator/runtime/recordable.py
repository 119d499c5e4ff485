"""What of a compiled graph decides whether and how its calls are recorded; as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

from stator.graph.edit import DONATED, EXTRAS
from stator.ops import draws
from stator.runtime.cuda_graphs import Recordable
from stator.runtime.plan import Plan, Require, View
from stator.torch_api import SYMBOLIC_TYPES, is_random_op, pytree, returns_of

# Their results depend on values, which the CPU waits for.
_WAITING: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_UNSAFE: Final = getattr(torch.Tag, "cudagraph_unsafe", None)  # what authors of operators say


def recordable(graph: fx.Graph, plan: Plan) -> Recordable:
    """What is to be known of a planned graph."""
    inputs = graph.find_nodes(op="placeholder")
    extras = len(graph.output_node().meta.get(EXTRAS, ()))
    count = len(plan.outputs)
    written = _written(plan)
    return Recordable(
        plan.device,
        why_not_recorded(graph, plan),
        shaped=tuple(i for i, node in enumerate(inputs) if _is_shaped(node.meta.get("val"))),
        saved=tuple(i for i, node in enumerate(inputs) if _is_saved(node)),
        written=tuple(i for i, name in enumerate(plan.inputs) if name in written),
        overwrites=tuple(i for i, name in enumerate(plan.inputs) if name in plan.donated),
        kept=tuple(range(count - extras, count)),
    )


def why_not_recorded(graph: fx.Graph, plan: Plan) -> str | None:
    """None if a recording of a call would do all that the call does; otherwise the reason."""
    if plan.device.type != "cuda":
        return "it runs on the CPU"
    if any(isinstance(step, Require) for step in plan.steps):
        return "it checks values, which the CPU waits for"
    return next((reason for node in graph.nodes if (reason := _why_not(node, plan.device))), None)


def _why_not(node: fx.Node, device: torch.device) -> str | None:
    if node.op == "output" or (node.op == "placeholder" and not node.users):
        return None
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.device != device:
            return f"{node.name} lies on {value.device}"
    if node.op != "call_function":
        return None
    tags = getattr(node.target, "tags", ())
    if node.target is draws.require_between or not _WAITING.isdisjoint(tags):
        return f"{node.name} makes the CPU wait for values"
    if _UNSAFE is not None and _UNSAFE in tags:
        return f"{node.name} is said to be unsafe to record"
    if node.kwargs.get("generator") is not None:
        return f"{node.name} draws from a generator of the program's own"
    if returns_of(node.target) == 0 or _has_effect(node):
        return f"{node.name} does something beside computing"
    return None


def _has_effect(node: fx.Node) -> bool:
    is_drawing = node.target is draws.draw_seed or is_random_op(node.target)
    return bool(node.meta.get("effect")) and not is_drawing


def _is_shaped(value: Any) -> bool:
    """Whether an input may have another size at another call."""
    if not isinstance(value, torch.Tensor):
        return True
    numbers = (*value.size(), *value.stride()) if value.layout is torch.strided else value.size()
    return any(isinstance(number, SYMBOLIC_TYPES) for number in numbers)


def _is_saved(node: fx.Node) -> bool:
    """Whether an input comes from the forward, and is nobody else's."""
    return bool(node.meta.get(DONATED)) and isinstance(node.meta.get("val"), torch.Tensor)


def _written(plan: Plan) -> frozenset[str]:
    """Inputs of the caller's that steps write to, through views as well."""
    source = {step.made.name: step.source for step in plan.steps if isinstance(step, View)}

    def roots() -> Iterator[str]:
        for name in (name for step in plan.steps for name in step.writes):
            while name in source:
                name = source[name]
            yield name

    return frozenset(roots()) & plan.callers
