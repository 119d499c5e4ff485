"""Products of dequantised tensors are products of integers, by oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.ops.libraries import int8_linear as onednn_linear
from stator.ops.libraries import int8_linear_of_tensors
from stator.ops.packs import int8_linear_weight
from stator.ops.quantize import DEQUANTIZERS
from stator.passes.freezing.quantized import (
    BOUNDED,
    FLOATS,
    Integers,
    IntegerWeight,
    Tail,
    moved,
    readers,
)
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

PRODUCTS: Final = (aten.mm.default, aten.addmm.default, aten.bmm.default)
INSIDE: Final = frozenset({"relu", "gelu", "hardtanh", "hardswish", "swish"})


@dataclass(frozen=True, slots=True)
class Product:
    """x @ w.t() + bias, x and w being dequantised."""

    nodes: tuple[fx.Node, ...]  # the product, and what adds the bias if that is another one
    x: Integers
    weight: IntegerWeight
    bias: fx.Node | None


def int8_linear(graph: fx.Graph, ctx: Ctx) -> int:
    """Let products compute with the integers that their operands were; return how many do.

    before: y = addmm(b, dequantize(x, 0.1, 3, …), t(dequantize_per_channel(w, s, …)))
            z = quantize(relu(y), 0.2, 5, …)
    after:  z = qlinear_pointwise(x, 0.1, 3, int8_linear_weight(w), s, …, b, 0.2, 5, u8, "relu", …)
    """
    if onednn_linear() is None:
        return 0
    settled = constant_nodes(graph)
    _note_others(graph, settled, ctx)
    changed = 0
    for node in list(graph.nodes):
        if node.target not in PRODUCTS:
            continue
        product = _product(node, settled)
        if product is None:
            continue
        if isinstance(product, str):
            ctx.record.notes.append(f"{node.name} is not int8: {product}")
            continue
        if ctx.fuel.spend(f"int8_linear: {node.name}"):
            inside = INSIDE if ctx.has_python else INSIDE - BOUNDED
            names = frozenset() if product.x.is_dynamic else inside
            tail = Tail.of(product.nodes, names)
            ctx.record.notes.append(f"{node.name} {tail.told()}")
            _rewrite(product, tail)
            changed += 1
    drop_unread(graph)
    return changed


def _note_others(graph: fx.Graph, settled: dict[fx.Node, None], ctx: Ctx) -> None:
    """Tell who reads dequantised weights and has no operator on integers."""
    for node in graph.nodes:
        if node.target in DEQUANTIZERS and all(one in settled for one in node.all_input_nodes):
            for reader in readers(node):
                if reader.target not in (*PRODUCTS, aten.convolution.default):
                    ctx.record.notes.append(
                        f"{reader.name} is not int8: it reads {node.name}, and knows no integers"
                    )


def _product(node: fx.Node, settled: dict[fx.Node, None]) -> Product | str | None:
    """The product that a node is; the reason, if it was to be expected; otherwise None."""
    *bias, left, right = node.args
    if node.target is aten.bmm.default:
        right = _for_all(right)
    x, weight = Integers.behind(left), IntegerWeight.behind(right, settled, turned=True)
    if isinstance(weight, str):
        return weight if x is not None else None
    if x is None:
        return "its input is not dequantised per tensor"
    if reason := _why_not(node, x):
        return reason
    nodes = _with_bias(node) if node.target is aten.bmm.default else (node,)
    added = nodes[1].args[1] if len(nodes) > 1 else None
    return Product(nodes, x, weight, bias[0] if bias else added)


def _for_all(read: Any) -> Any:
    """The matrix that all of a batch are multiplied by, if it is one."""
    if read.target is aten.expand.default and read.args[0].meta["val"].dim() == 2:
        return read.args[0]
    return read


def _with_bias(node: fx.Node) -> tuple[fx.Node, ...]:
    """A product of batches, and the addition of a row to it, if that is all that reads it."""
    (user, *others) = node.users or (node,)
    if others or user.target is not aten.add.Tensor or user.args[0] is not node or user.kwargs:
        return (node,)
    row = user.args[1]
    is_row = isinstance(row, fx.Node) and row.meta["val"].dim() == 1
    if not is_row or row.meta["val"].size(0) != node.meta["val"].size(-1):
        return (node,)
    return (node, user) if row.meta["val"].dtype == node.meta["val"].dtype else (node,)


def _why_not(node: fx.Node, x: Integers) -> str | None:
    value = node.meta["val"]
    if value.device.type != "cpu" or node.kwargs:
        return "it is no plain product on the CPU"
    if value.dtype not in FLOATS:
        return f"it is of {value.dtype}"
    if any(isinstance(n, int) and n == 0 for n in (*value.size(), *x.source.meta["val"].size())):
        return "it is empty"
    if node.target is aten.addmm.default and node.args[0].meta["val"].dim() != 1:
        return "what is added is no bias"
    return None


def _rewrite(product: Product, tail: Tail) -> None:
    node, weight = product.nodes[0], product.weight
    graph = node.graph
    builder = Builder(graph, tail.last)
    x = product.x.moved(builder)
    if not x.meta["val"].is_contiguous():
        x = builder.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    size = list(x.meta["val"].size())
    shape = size if all(isinstance(n, int) for n in size) else None
    scale, zero_point, dtype = tail.output
    after = tail.activation
    with graph.inserting_before(tail.last):
        packed = graph.call_function(int8_linear_weight, (weight.node, weight.zero_points, shape))
        packed.meta = {"val": weight.node.meta["val"].t()}
        scales, points = weight.prepared(graph)
        arguments: tuple[Any, ...] = (x, product.x.scale, product.x.zero_point, packed)
        arguments += (scales, points, product.bias, scale, zero_point, dtype)
        arguments += (after.name, list(after.numbers), after.algorithm)
        called = int8_linear_of_tensors() if product.x.is_dynamic else onednn_linear()
        made = graph.call_function(called, arguments)
    made.meta = {
        **node.meta,
        "val": node.meta["val"].new_empty(node.meta["val"].size(), dtype=dtype),
    }
    tail.take_place(moved(made, tail.moves, builder))
