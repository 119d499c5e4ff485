"""One spelling for each torch call: functions, methods and operators that mean the same.

Graphs that Dynamo captures say `x @ y`, `torch.matmul(x, y)`, `x.matmul(y)` or `torch.bmm(x, y)`.
`reading(node)` says "matmul" of all of them, with the arguments by name.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx

from stator.torch_api import HigherOrderOperator, OpOverload, OpOverloadPacket, is_mutable_op

VALUE: Final = "example_value"  # where Dynamo notes what a node computes


@dataclass(frozen=True, slots=True)
class Call:
    """A call by its meaning."""

    name: str
    args: Mapping[str, Any]
    in_place: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.args[name]


def _matmul(input: Any, other: Any) -> None: ...
def _bmm(input: Any, mat2: Any) -> None: ...
def _binary(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> None: ...
def _softmax(
    input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None, half_to_float: Any = None
) -> None: ...
def _masked_fill(input: Any, mask: Any, value: Any) -> None: ...
def _where(condition: Any, input: Any, other: Any) -> None: ...
def _where_method(input: Any, condition: Any, other: Any) -> None: ...
def _transpose(input: Any, dim0: Any, dim1: Any) -> None: ...
def _dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> None: ...
def _only(input: Any) -> None: ...
def _sized(input: Any, *shape: Any) -> None: ...
def _cast(input: Any, dtype: Any = None, *rest: Any, **named: Any) -> None: ...
def _full(size: Any, fill_value: Any, **named: Any) -> None: ...
def _tensor(data: Any, **named: Any) -> None: ...
def _einsum(equation: Any, *operands: Any) -> None: ...


_MEANINGS: Final[dict[str, tuple[Callable[..., None], tuple[Any, ...]]]] = {
    "matmul": (_matmul, (torch.matmul, operator.matmul, "matmul", "__matmul__")),
    "bmm": (_bmm, (torch.bmm, "bmm")),
    "add": (_binary, (torch.add, operator.add, "add", "__add__", "__radd__")),
    "sub": (_binary, (torch.sub, torch.subtract, operator.sub, "sub", "subtract")),
    "mul": (_binary, (torch.mul, torch.multiply, operator.mul, "mul", "multiply", "__rmul__")),
    "div": (
        _binary,
        (torch.div, torch.divide, torch.true_divide, operator.truediv, "div", "divide"),
    ),
    "add_": (_binary, (operator.iadd, "add_", "__iadd__")),
    "mul_": (_binary, (operator.imul, "mul_", "__imul__")),
    "div_": (_binary, (operator.itruediv, "div_", "__itruediv__")),
    "softmax": (_softmax, (torch.softmax, F.softmax, "softmax")),
    "masked_fill": (_masked_fill, (torch.masked_fill, "masked_fill")),
    "masked_fill_": (_masked_fill, ("masked_fill_",)),
    "where": (_where, (torch.where,)),
    "where_method": (_where_method, ("where",)),
    "transpose": (
        _transpose,
        (torch.transpose, torch.swapaxes, torch.swapdims, "transpose", "swapaxes", "swapdims"),
    ),
    "dropout": (_dropout, (F.dropout, torch.dropout)),
    "contiguous": (_only, ("contiguous", "clone", torch.clone)),
    "full": (_full, (torch.full,)),
    "tensor": (_tensor, (torch.tensor,)),
    "view": (_sized, ("view", "reshape", torch.reshape)),
    "to": (_cast, ("to", "type")),
    "float": (_only, ("float",)),
    "half": (_only, ("half",)),
    "bfloat16": (_only, ("bfloat16",)),
    "type_as": (_matmul, ("type_as",)),
    "einsum": (_einsum, (torch.einsum,)),
}
_BY_TARGET: Final = {
    target: (name, inspect.signature(like))
    for name, (like, targets) in _MEANINGS.items()
    for target in targets
}


def reading(node: Any) -> Call | None:
    """What a node calls, by its meaning; None if that is not in the list."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    try:
        name, signature = _BY_TARGET[node.target]
        bound = signature.bind(*node.args, **node.kwargs)
    except (KeyError, TypeError):
        return None
    bound.apply_defaults()
    in_place = name.endswith("_") or bool(bound.arguments.get("inplace"))
    name = name.rstrip("_").removesuffix("_method")
    if name == "bmm":
        return Call("matmul", {"input": bound.arguments["input"], "other": bound.arguments["mat2"]})
    return Call(name, bound.arguments, in_place)


def value_of(node: Any) -> Any:
    """What Dynamo says a node computes; constants are themselves."""
    return node.meta.get(VALUE) if isinstance(node, fx.Node) else node


_WRITING: Final = frozenset(
    {
        operator.setitem,
        operator.delitem,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.imatmul,
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.ilshift,
        operator.irshift,
        operator.iconcat,
    }
)


def may_write(node: fx.Node) -> bool:
    """Whether a torch-level call may write to one of its arguments."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_module" or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.target in _WRITING or isinstance(node.target, HigherOrderOperator):
        return True
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        packet = isinstance(node.target, OpOverloadPacket)
        names = node.target.overloads() if packet else ()
        overloads = [getattr(node.target, name) for name in names] if packet else [node.target]
        return any(map(is_mutable_op, overloads))
    if getattr(node.target, "__module__", "") == F.__name__ and any(a is True for a in node.args):
        return True  # `inplace`, by position
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def is_written_between(first: fx.Node, last: fx.Node, besides: Collection[fx.Node] = ()) -> bool:
    """Whether a call between two nodes, other than `besides`, may write to a tensor."""
    node = first.next
    while node is not last:
        if node not in besides and may_write(node):
            return True
        node = node.next
    return False
