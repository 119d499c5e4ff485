"""Operators with factors that no C function of torch takes, in steps that a library can make.

A factor goes as a double there: not to integers, and not where it is complex.  Products and sums of
such tensors are kernels of ours, or operators that take tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.torch_api import given_arguments

aten: Final = torch.ops.aten


def spell_factors(graph: fx.Graph) -> int:
    """Write such operators out; return how many were.

    before: y = addr(x, a, b, beta=0.5, alpha=2)
    after:  y = x * 0.5 + unsqueeze(a, 1) * b * 2
    """
    spelled = 0
    for node in list(graph.nodes):
        steps = _STEPS.get(node.target)
        if steps is None or not _needs_steps(node):
            continue
        new = Builder(graph, node).run(steps, *given_arguments(node.target, node.args, node.kwargs))
        new.meta |= {name: value for name, value in node.meta.items() if name != "val"}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        spelled += 1
    return spelled


def _needs_steps(node: fx.Node) -> bool:
    """Whether no C function takes its factors."""
    dtype = node.meta["val"].dtype
    if node.target is aten.addr.default:
        return True
    if not dtype.is_complex:
        return not dtype.is_floating_point and node.target not in _KERNELS
    given = given_arguments(node.target, node.args, node.kwargs)
    return node.target in _NEVER_COMPLEX or any(isinstance(one, complex) for one in given)


def _scaled(value: Any, factor: Any, dtype: torch.dtype) -> Any:
    """A tensor times a number; of truths, whether both are so."""
    if dtype is torch.bool:
        return value if factor else aten.zeros_like(value)
    return value if factor == 1 else value * factor


def _sum(x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    dtype = torch.promote_types(x.dtype, product.dtype)
    scaled = _scaled(product, alpha, dtype)
    # Where nothing is to be taken of x, a NaN there is nothing, too.
    return (_scaled(x, beta, dtype) if beta else aten.zeros_like(x)) + scaled


def _addr(x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return _sum(x, aten.unsqueeze(a, 1) * b, beta, alpha)


def _addmv(x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return _sum(x, aten.mv(a, b), beta, alpha)


def _addmm(x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return _sum(x, aten.mm(a, b), beta, alpha)


def _baddbmm(x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return _sum(x, aten.bmm(a, b), beta, alpha)


def _addbmm(x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    product = aten.sum.dim_IntList(aten.bmm(a, b), [0], False, dtype=x.dtype)
    return _sum(x, product, beta, alpha)


def _addcmul(x: Any, a: Any, b: Any, value: Any) -> Any:
    return _sum(x, _scaled(a, value, x.dtype) * b, 1, 1)


def _addcdiv(x: Any, a: Any, b: Any, value: Any) -> Any:
    return _sum(x, _scaled(a, value, x.dtype) / b, 1, 1)


def _add(x: Any, y: Any, alpha: Any) -> Any:
    return x + y * alpha


def _sub(x: Any, y: Any, alpha: Any) -> Any:
    return x - y * alpha


_STEPS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.addr.default: _addr,
    aten.addmv.default: _addmv,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.addbmm.default: _addbmm,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
}
# Those that are kernels of ours where elements are integers, and those without a C function.
_KERNELS: Final = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.addcmul.default,
    aten.addcdiv.default,
)
_NEVER_COMPLEX: Final = (aten.addcmul.default, aten.addcdiv.default)
