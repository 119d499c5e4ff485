"""Quick traces beside full ones: node by node, and in what is said of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.traceback import set_stack_trace
from torch.overrides import TorchFunctionMode

from stator.aot import trace as tracing
from stator.aot.quick import record, why_not_quick
from stator.aot.trace import Traced, trace
from stator.graph.edit import drop_unread
from stator.torch_api import is_view_op

Program = Callable[..., Sequence[Any]]
NOTES = ("in_forward", "stack_trace", "recompute", "ac_graph_id")


def is_recorded(program: Program, inputs: Sequence[Any], mode: Any) -> bool:
    """Whether a program needs no full trace."""
    if why_not_quick(inputs) is not None:
        return False
    with torch.autograd.set_multithreading_enabled(False), mode:
        return not isinstance(record(program, inputs), str)


class _Lines(TorchFunctionMode):
    """Gives each function that a program calls a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        set_stack_trace([f"line {self.calls}"])
        return func(*args, **(kwargs or {}))


def assert_same_lines(function: Program, inputs: Sequence[Any], mode: Any) -> None:
    """A program is traced alike, each of its functions with a line of its own."""

    def program(*arguments: Any) -> Sequence[Any]:
        with _Lines():
            return function(*arguments)

    assert_same(program, inputs, mode)


def assert_same(program: Program, inputs: Sequence[Any], mode: Any) -> None:
    """A quick trace can be had, and is what the full one is, down to the lines of the backward."""
    assert is_recorded(program, inputs, mode)
    quick = trace(program, inputs, mode, may_run_again=True)
    full = trace(program, inputs, mode)
    assert quick.program == full.program
    assert quick.updated == full.updated
    assert (full.backward_error, full.custom_backward) == (None, False)
    assert rows(quick) == rows(full)
    assert len(quick.tangents) == len(full.tangents)


def rows(traced: Traced) -> list[str]:
    """The graph without what nobody reads, such as views that functionalization takes anew.

    And without `detach`, by which autograd saves tensors.
    """
    graph = traced.module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    drop_unread(graph)
    for node in reversed(list(graph.nodes)):  # functionalization takes views when they are read
        if is_view_op(node.target):
            min(node.users).prepend(node)
    names = {node.name: f"v{number}" for number, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        given = torch.fx.map_arg((node.args, node.kwargs), lambda one: names[one.name])
        target = node.op if node.op == "placeholder" else node.target
        notes = [node.meta.get(name) for name in NOTES] if node.op == "call_function" else []
        value = _told(node.meta.get("val")) if node.op != "output" else ""
        found.append(f"{names[node.name]} = {target}{given}: {value} {notes}")
    return found


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        place = (value.size(), value.stride(), value.storage_offset(), value.device)
        return f"{value.dtype} {place} {value.requires_grad}"
    if isinstance(value, list | tuple) and any(one is not None for one in value):
        return str([_told(one) for one in value])
    return "none" if value is None or isinstance(value, list | tuple) else str(value)


def without_full_trace(monkeypatch: Any) -> None:
    """Let nothing be traced in full any more."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a full trace")

    monkeypatch.setattr(tracing, "make_fx", refuse)
