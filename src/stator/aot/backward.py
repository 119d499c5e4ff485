"""What a trace does between the forward and the backward: tangents, and lines for the latter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import set_stack_trace

from stator.aot.metadata import TangentPlan
from stator.aot.subclasses import Layout, Plain
from stator.torch_api import is_dense, remember_numbers, sequence_number


class Enter(torch.autograd.Function):
    """Identity that makes a non-leaf of a leaf, so that the program may write to it in place."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A second functional tensor over the same recorded value."""
        return make()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        """The gradient, unchanged."""
        return grad, None


def history(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Autograd's nodes behind `outputs`, each once."""
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


def is_custom(history: Any) -> bool:
    """Whether it is a torch.autograd.Function, other than our own."""
    return isinstance(history, torch.autograd.function.BackwardCFunction) and not isinstance(
        history, Enter._backward_cls
    )


def carry_lines(history: Iterable[Any], graph: fx.Graph) -> None:
    """Give what autograd is about to record the lines of the operators that it differentiates."""
    lines: dict[int, str] = {}
    for node in graph.nodes:
        # The first of a number: what is recorded without autograd's notice has the last one's.
        if "seq_nr" in node.meta and node.meta.get("stack_trace"):
            lines.setdefault(node.meta["seq_nr"], node.meta["stack_trace"])
    for one in history:
        if (line := lines.get(sequence_number(one))) is not None:
            one.register_prehook(partial(_set_line, line))


def _set_line(line: str, _: Any) -> None:
    set_stack_trace([line])


def plan_tangent(value: torch.Tensor, layout: Layout) -> TangentPlan:
    """Tangents lie as their values do; those of values with gaps or overlaps, contiguous."""
    if not isinstance(layout, Plain):
        return TangentPlan(layout, None, channels_last=False)
    numbers = (*value.size(), *value.stride())
    symbolic = any(isinstance(n, torch.SymInt) for n in numbers)
    if not is_dense(value):
        return TangentPlan(layout, None, channels_last=False, is_symbolic=symbolic)
    channels_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return TangentPlan(
        layout,
        None if symbolic else tuple(value.stride()),
        bool(channels_last and not value.is_contiguous()),
        symbolic,
    )


def placeholders_first(graph: fx.Graph) -> None:
    """Tangents entered in the middle: move them up, behind the primals."""
    body = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        body.prepend(node)


def tangent_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tangent that lies as its value does; of values with gaps or overlaps, contiguous."""
    with torch.no_grad():
        about: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        if is_dense(value):
            tangent = torch.empty_strided(value.size(), value.stride(), **about)
        else:
            tangent = torch.empty(value.size(), **about)
    remember_numbers(tangent, value)
    return tangent


def tangent_name(graph: fx.Graph) -> str:
    """A name for the placeholder that comes next: the graph only grows."""
    return f"tangent_{len(graph.nodes)}"
