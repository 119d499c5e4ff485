"""Operators over lists, one operator for each tensor: so that they fuse with what is around."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx

aten = torch.ops.aten

_UNARY: Final = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1"),
    *("floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "clone"),
)
_ARITHMETIC: Final = ("add", "sub", "mul", "div")
_EXTREMES: Final = {"clamp_max": "minimum", "minimum": "minimum", "clamp_min": "maximum"}
_EXTREMES_OF_NUMBERS: Final = {"minimum": "clamp_max", "maximum": "clamp_min"}


def _single_operators() -> dict[Any, Any]:
    """The operator on one tensor for each operator on lists."""
    found = {
        getattr(aten, f"_foreach_{name}").default: getattr(aten, name).default
        for name in _UNARY
        if hasattr(aten, f"_foreach_{name}")  # clone came after torch 2.11
    }
    found[aten._foreach_copy.default] = aten.copy.default
    found[aten._foreach_zero.default] = aten.zeros_like.default
    for name in _ARITHMETIC:
        packet = getattr(aten, f"_foreach_{name}")
        for overload in packet.overloads():
            if not overload.endswith("out"):
                found[getattr(packet, overload)] = getattr(aten, name).Tensor
    for name in ("clamp_max", "clamp_min", "minimum", "maximum"):
        packet = getattr(aten, f"_foreach_{name}")
        found[packet.List] = getattr(aten, _EXTREMES.get(name, "maximum")).default
        number = getattr(aten, _EXTREMES_OF_NUMBERS.get(name, name)).default
        found[packet.Scalar] = found[packet.ScalarList] = number
    for name in ("addcmul", "addcdiv"):
        packet, single = getattr(aten, f"_foreach_{name}"), getattr(aten, name).default
        found[packet.Scalar] = found[packet.ScalarList] = single
    found[aten._foreach_lerp.List] = aten.lerp.Tensor
    found[aten._foreach_lerp.Scalar] = aten.lerp.Scalar
    found[aten._foreach_pow.List] = aten.pow.Tensor_Tensor
    found[aten._foreach_pow.Scalar] = found[aten._foreach_pow.ScalarList] = aten.pow.Tensor_Scalar
    found[aten._foreach_pow.ScalarAndTensor] = aten.pow.Scalar
    return found


SINGLE: Final = _single_operators()
# Their number comes last and is a keyword of the operator on one tensor.
_NUMBER_IS_NAMED: Final = {aten.addcmul.default: "value", aten.addcdiv.default: "value"}


def unroll_foreach(graph: fx.Graph, ctx: Ctx) -> int:
    """Replace operators over lists by operators over their tensors; return how many.

    before: l = _foreach_add([x, y], 1);  a = l[0];  b = l[1]
    after:  a = add(x, 1);  b = add(y, 1)
    """
    unrolled = 0
    for node in list(graph.nodes):
        single = SINGLE.get(node.target) if node.op == "call_function" else None
        results = node.meta.get("val")
        if single is None or not isinstance(results, list | tuple):
            continue
        if any(user.op == "output" for user in node.users) or not ctx.fuel.spend(node.name):
            continue
        for user in list(node.users):
            position = user.args[1]
            with graph.inserting_before(node):
                args, kwargs = _at(position, single, node)
                replacement = graph.call_function(single, args, kwargs)
            replacement.meta = {**node.meta, "val": results[position]}
            user.replace_all_uses_with(replacement)
            graph.erase_node(user)
        graph.erase_node(node)
        unrolled += 1
    return unrolled


def _at(position: int, single: Any, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one tensor: lists give their element, the rest stands for all."""
    args = [arg[position] if isinstance(arg, list | tuple) else arg for arg in node.args]
    kwargs = {
        name: value[position] if isinstance(value, list | tuple) else value
        for name, value in node.kwargs.items()
        if name != "non_blocking"
    }
    named = _NUMBER_IS_NAMED.get(single)
    if named is not None:
        given = kwargs.pop("scalars", None)
        number = args.pop() if len(args) > 3 else given
        if number is not None:
            kwargs[named] = number
    if "scalars" in kwargs:
        args.append(kwargs.pop("scalars"))
    return tuple(args), kwargs
