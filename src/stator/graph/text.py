"""Graphs in words, a line a node: for explanations, where what torch prints is too long."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stator.core.dtypes import from_torch
from stator.core.events import NodeText
from stator.graph.verify import user_line
from stator.torch_api import OpOverload

LONGEST = 240  # characters of a line; arguments beyond are cut off


def graph_text(graph: fx.Graph) -> tuple[NodeText, ...]:
    """Every node: its name, its text and the user's line."""
    return tuple((node.name, node_text(node), user_line(node)) for node in graph.nodes)


def node_text(node: fx.Node) -> str:
    """One node.  Text form: `add: f32[4, 8] = aten.add.Tensor(x, y)`."""
    if node.op == "output":
        return _cut(f"return {_value(node.args[0])}")
    value = node.meta.get("val", node.meta.get("example_value"))
    kind = f": {shape_text(value)}" if value is not None else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = input"
    given = [_value(arg) for arg in node.args]
    given += [f"{name}={_value(arg)}" for name, arg in node.kwargs.items()]
    return _cut(f"{node.name}{kind} = {operator_name(node)}({', '.join(given)})")


def operator_name(node: fx.Node) -> str:
    """What a node calls, without an address."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", None) or type(target).__name__
    is_public = module.split(".")[0] == "torch" and "._" not in module
    return f"{module}.{name}" if is_public else str(name)


def shape_text(value: Any) -> str:
    """A value's type and sizes.  Text form: `f32[4, 8]`; several in parentheses."""
    if isinstance(value, torch.Tensor):
        dtype = from_torch(value.dtype)
        name = str(value.dtype).removeprefix("torch.") if dtype is None else dtype.value
        return f"{name}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shape_text, value))})"
    return type(value).__name__ if not isinstance(value, torch.SymInt) else str(value)


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, torch.Tensor):
        return f"constant {shape_text(value)}"
    return str(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} …"
