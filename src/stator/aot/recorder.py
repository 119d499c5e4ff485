"""A mode over fake tensors that notes each operator that reaches it as a node of a graph.

Autograd may be on top of it: what that saves, it asks for by `detach`, and what it computes in a
backward comes here as operators like any other.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from stator.aot.memo import Memo, twin_of
from stator.aot.norms import RESPELLED
from stator.graph.rules import layout_of
from stator.torch_api import (
    OpOverload,
    TorchDispatchMode,
    is_mutable_op,
    is_taken_apart,
    storage_of,
    view_base,
)

aten = torch.ops.aten

# What these return depends on values, of which symbols are made.
_OF_VALUES: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Operators of others may do what they do not say.
_KNOWN: Final = ("aten", "prims", "quantized_decomposed", "mkldnn", "mkl", "onednn")
# What functionalization calls in the place of others.
_AS_FUNCTIONAL: Final = {aten.lift_fresh_copy.default: aten.clone.default}
# Operators that return what others, of another name, write to their first argument.
_TWINS: Final = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
# Those of operators that have results beside what they write to, and where that stands among the
# arguments; its new values come last among the results.
_NORM: Final = aten._native_batch_norm_legit
_FORMS: Final = {_NORM.default: (aten._native_batch_norm_legit_functional.default, (3, 4))}


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it takes elements by their numbers: only truths select as many as there are."""
    if func is not aten.index.Tensor:
        return False
    masks = (torch.bool, torch.uint8)
    return not any(isinstance(i, torch.Tensor) and i.dtype in masks for i in args[1])


class NotQuickError(Exception):
    """The program takes a full trace."""


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
        self.memo = Memo()
        self.sharing: Counter[Any] = Counter()  # how many tensors lie in each storage
        self.written: set[int] = set()  # identities of tensors that were written to
        for number, value in enumerate(inputs):
            self.enter(value, f"arg{number}_1")
        self.given = set(self.sharing)  # storages of the caller's

    def enter(self, value: torch.Tensor, name: str) -> fx.Node:
        """A placeholder that stands for `value`."""
        node = self.graph.placeholder(name)
        self._note(node, value)
        return node

    def node_of(self, value: torch.Tensor) -> fx.Node:
        """The node that computes what the tensor holds now."""
        node = self.nodes.get(id(value))
        if node is None:
            raise NotQuickError("a tensor that the program holds")
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operator's result, which is noted; what is taken apart is noted in its parts."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise NotQuickError(f"{func} is no plain operator")
        if func is torch.ops.prim.device.default:
            return args[0].device
        if func.namespace not in _KNOWN:
            raise NotQuickError(f"{func} may do what it does not say")
        if is_taken_apart(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        if func in RESPELLED:
            with self:
                result = RESPELLED[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if any(tag in func.tags for tag in _OF_VALUES) and not _by_numbers(func, args):
            raise NotQuickError(f"what {func} returns depends on values")
        func = _AS_FUNCTIONAL.get(func, func)
        if func is aten.detach.default:
            return self._detach(args[0])
        if is_mutable_op(func):
            return self._write(func, args, kwargs)
        return self._call(func, args, kwargs)

    def _detach(self, value: torch.Tensor) -> torch.Tensor:
        """Below autograd, it is the tensor.

        The program gets new tensors like this, and never sees what the operator itself returned.
        """
        result, node = twin_of(value), self.node_of(value)
        if _is_new(node) and not node.users and self.sharing[storage_of(value)] == 1:
            del self.nodes[id(value)]
            self.sharing[storage_of(value)] = 0
        self._know(result, node)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the operator that returns what `func` writes."""
        form, places = _FORMS.get(func) or (_TWINS.get(func) or _functional_twin(func), (0,))
        written = [args[place] for place in places]
        if form is None or torch.Tag.inplace_view in func.tags:
            raise NotQuickError(f"{func} writes, and has no other form")
        if not all(map(self._may_write, written)):
            raise NotQuickError(f"{func} writes to what others may see")
        if func is aten.bernoulli_.float and len(args) == 1:
            args = (*args, 0.5)  # its twin has no default
        results = self._call(form, args, kwargs)
        news = [results] if len(places) == 1 else results[-len(places) :]
        for old, new in zip(written, news, strict=True):
            fits = layout_of(new) == layout_of(old) and new.dtype == old.dtype
            if not fits or self.sharing[storage_of(new)] != 1:
                raise NotQuickError(f"{func} writes what does not fit there")
            self.nodes[id(old)] = self.nodes[id(new)]
            self.written.add(id(old))
        return written[0] if len(places) == 1 else results[: -len(places)]

    def _may_write(self, value: Any) -> bool:
        """Whether nobody else sees it; how autograd is told of inputs, the full trace knows."""
        place = storage_of(value)
        alone = place is not None and self.sharing[place] == 1
        return alone and not (place in self.given and value.requires_grad)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result, which is noted."""
        if kwargs.get("generator") is not None:
            raise NotQuickError(f"{func} draws from a generator of its own")
        nodes = self._nodes_of(args), self._nodes_of(kwargs)
        if (nodes[0] and nodes[0][-1] is None) or None in nodes[1].values():
            nodes = _without_defaults(func, *nodes)
        node = self._node(func, *nodes, name=func.overloadpacket.__name__)
        result = self.memo.call(func, args, kwargs)
        self._note(node, result)
        return result

    def _node(self, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
        # By the tracer: it knows of the line that the interpreter is at.
        return self.tracer.create_node("call_function", target, args, kwargs, name=name)

    def _nodes_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
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
            raise NotQuickError(f"{node.target} returns a {type(value).__name__}")
        # A plain number (the longest sequence, of attention on a GPU) is the same at every call:
        # sizes are, and what depends on values did not come this far.

    def finish(self) -> None:
        """Let values forget that they, or what they are views of, may be trained.

        The program saw it: torch takes some products apart by that.
        """
        for node in self.graph.nodes:
            value = node.meta["val"]
            if node.op == "placeholder":
                node.meta["val"] = twin_of(value) if value.requires_grad else value
            elif isinstance(value, torch.Tensor):
                node.meta["val"] = _untrained(value)
            elif isinstance(value, list | tuple):
                node.meta["val"] = type(value)(map(_untrained, value))


@cache
def _functional_twin(target: Any) -> Any:
    """The operator that returns what `target` writes to its first argument; None without one."""
    packet, _, overload = target.name().partition("::")[2].partition(".")
    of = getattr(getattr(torch.ops, target.namespace), packet.removesuffix("_"), None)
    twin = getattr(of, overload or "default", target)
    first, *others = (argument.alias_info for argument in target._schema.arguments)
    one, other = ([(a.name, a.default_value) for a in t._schema.arguments] for t in (target, twin))
    fits = first is not None and not any(others) and one == other
    return twin if fits and not twin._schema.is_mutable else None


def _is_new(node: fx.Node) -> bool:
    """Whether it is a new tensor, of other tensors' sizes at the most."""
    name = str(node.name)
    return node.op == "call_function" and (
        not node.all_input_nodes or name.startswith("new_") or "_like" in name
    )


def _without_defaults(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments less those that are the defaults: some formulas spell None out."""
    taken = func._schema.arguments
    while args and _is_default(taken[len(args) - 1], args[-1]):
        args = args[:-1]
    names = {one.name: one for one in taken}
    return args, {k: one for k, one in kwargs.items() if not _is_default(names[k], one)}


def _is_default(argument: Any, value: Any) -> bool:
    default = argument.default_value
    return argument.has_default_value() and type(value) is type(default) and value == default


def _untrained(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    if value.grad_fn is None or view_base(value) is not None:
        return twin_of(value)
    return value.detach_()  # an operator's result, which is ours: no new tensor is needed
