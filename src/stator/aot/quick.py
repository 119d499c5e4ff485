"""A quick trace, of programs without a backward that write to nothing but their own results.

One mode over fake tensors notes each operator that reaches it: no autograd, no functionalization,
no proxies, and a fifth of their time.  Whatever is not that simple is left to the full trace, which
records the same nodes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.aot.metadata import OutputFact, Source
from stator.core.torch_types import Flat
from stator.graph.edit import draws_numbers
from stator.graph.rules import layout_of
from stator.torch_api import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autocast_state,
    detached,
    functional_twin,
    is_mutable_op,
    is_taken_apart,
    storage_of,
)

aten = torch.ops.aten

# What these return depends on values, of which symbols are made.
_OF_VALUES: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Operators of others may do what they do not say.
_KNOWN: Final = ("aten", "prims", "quantized_decomposed", "mkldnn", "mkl", "onednn")
# What functionalization calls in the place of others.
_AS_FUNCTIONAL: Final = {aten.lift_fresh_copy.default: aten.clone.default}


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it takes elements by their numbers: only truths select as many as there are."""
    if func is not aten.index.Tensor:
        return False
    masks = (torch.bool, torch.uint8)
    return not any(isinstance(i, torch.Tensor) and i.dtype in masks for i in args[1])


class NotQuickError(Exception):
    """The program takes a full trace."""


def may_be_quick(inputs: Sequence[Any]) -> bool:
    """Whether a program of these fake inputs has no backward, and sizes that are numbers."""
    tensors = {id(v): v for v in inputs if type(v) in (FakeTensor, torch.nn.Parameter)}.values()
    if len(tensors) < len(inputs) or torch.is_inference_mode_enabled() or autocast_state():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return False
    numbers = (n for tensor in tensors for n in (*tensor.size(), tensor.storage_offset()))
    return all(isinstance(number, int) for number in numbers)


class Recorder(TorchDispatchMode):
    """Notes operators as nodes of a graph.

    A tensor is known by its identity: `values` keeps all of them alive.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.tracer = fx.Tracer()
        self.graph = self.tracer.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.values: list[torch.Tensor] = []
        self.inputs = inputs
        self.sharing: Counter[Any] = Counter()  # how many tensors lie in each storage
        for number, value in enumerate(inputs):
            node = self.graph.placeholder(f"arg{number}_1")
            self._note(node, value)
        self.given = set(self.sharing)  # storages of the caller's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operator's result, which is noted; what is taken apart is noted in its parts."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise NotQuickError(func)
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        if func.namespace not in _KNOWN:
            raise NotQuickError(func)
        if is_taken_apart(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        if any(tag in func.tags for tag in _OF_VALUES) and not _by_numbers(func, args):
            raise NotQuickError(func)
        written, func = None, _AS_FUNCTIONAL.get(func, func)
        if func is aten.detach.default:  # without autograd, it is the tensor
            result = func(*args)
            self._know(result, self._nodes_of(args[0]))
            return result
        if is_mutable_op(func):
            written, func = args[0], self._twin(func, args)
        node = self._call(func, args, kwargs)
        result = func(*args, **kwargs)
        if written is None:
            self._note(node, result)
            return result
        if layout_of(result) != layout_of(written) or result.dtype != written.dtype:
            raise NotQuickError(func)
        node.meta["val"] = result
        self.nodes[id(written)] = node
        return written

    def _twin(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operator that returns what `func` writes to its first argument, which is fresh."""
        twin, place = functional_twin(func), storage_of(args[0])
        if twin is None or place is None or place in self.given or self.sharing[place] != 1:
            raise NotQuickError(func)
        return twin

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        nodes = self._nodes_of(args), self._nodes_of(kwargs)
        node = self._node(func, *nodes, name=func.overloadpacket.__name__)
        if draws_numbers(node):
            raise NotQuickError(func)
        return node

    def _node(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        # By the tracer: it knows of the line that the interpreter is at.
        return self.tracer.create_node("call_function", target, args, kwargs, name=name)

    def _nodes_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = self.nodes.get(id(value))
            if node is None:  # a tensor that the program holds
                raise NotQuickError(value)
            return node
        if isinstance(value, list | tuple):
            return type(value)(map(self._nodes_of, value))
        if isinstance(value, dict):
            return {key: self._nodes_of(one) for key, one in value.items()}
        return value

    def _know(self, value: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(value)] = node
        self.values.append(value)
        self.sharing[storage_of(value)] += 1

    def _note(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._know(value, node)
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                self._note(self._node(operator.getitem, (node, number), {}, "getitem"), one)
        elif value is not None and not isinstance(value, int):
            raise NotQuickError(value)
        # A plain number (the longest sequence, of attention on a GPU) is the same at every call:
        # sizes are, and what depends on values did not come this far.

    def finish(self) -> None:
        """Let values forget that they, or what they are views of, may be trained.

        The program saw it: torch takes some products apart by that.
        """
        for node in self.graph.nodes:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                node.meta["val"] = _untrained(value)
            elif isinstance(value, list | tuple):
                node.meta["val"] = type(value)(map(_untrained, value))


def _untrained(value: Any) -> Any:
    trains = isinstance(value, torch.Tensor) and value.requires_grad
    return detached(value) if trains else value


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a program was traced to."""

    graph: fx.Graph  # without an output
    inputs: list[fx.Node]
    values: list[fx.Node]  # outputs that the graph computes, each once
    returned: list[int]  # for each of them, the output that it is
    outputs: list[OutputFact]


def record(function: Flat, inputs: Sequence[torch.Tensor]) -> Recorded | None:
    """Run a program on fake tensors; None if that takes more than this.

    The program may run again: it has no effects beyond its tensors.
    """
    recorder, grad_mode = Recorder(inputs), torch.is_grad_enabled()
    try:
        with recorder:
            outputs = function(*recorder.inputs)
        if torch.is_grad_enabled() != grad_mode:
            return None
        recorder.finish()
        return _sorted(recorder, outputs)
    except Exception:  # what is wrong with the program, if anything is, the full trace will say
        return None
    finally:
        torch.set_grad_enabled(grad_mode)


def _sorted(recorder: Recorder, outputs: Sequence[Any]) -> Recorded | None:
    """Where each output comes from; None if one shares memory with an input or another."""
    placeholders = [recorder.nodes[id(value)] for value in recorder.inputs]
    found = Recorded(recorder.graph, placeholders, [], [], [])
    firsts = {id(value): number for number, value in reversed(list(enumerate(outputs)))}
    places = {id(value): number for number, value in enumerate(recorder.inputs)}
    taken = set(recorder.given)
    for number, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, bool | int | float | str | None):
                return None
            found.outputs.append(OutputFact(Source.CONSTANT, constant=value))
        elif id(value) in places:
            found.outputs.append(OutputFact(Source.INPUT, places[id(value)], value.requires_grad))
        elif firsts[id(value)] < number:
            found.outputs.append(OutputFact(Source.OUTPUT, firsts[id(value)]))
        elif storage_of(value) in taken or value.requires_grad:
            return None
        else:
            taken.add(storage_of(value))
            found.outputs.append(OutputFact(Source.GRAPH, len(found.values)))
            found.values.append(recorder.nodes[id(value)])
            found.returned.append(number)
    return found
