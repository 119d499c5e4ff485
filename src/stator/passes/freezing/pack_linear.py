"""Products with weights read them packed, as the library that is fastest here wants them.

Packing is what a product begins with; done once, the rest runs at 295 to 326 GFLOP/s instead of
204 to 287 (two AVX-512 cores, 128 rows).  Where no packed way wins, the product stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from stator.graph.run import Ctx
from stator.ops.libraries import mkl_linear, onednn_linear
from stator.ops.packs import mkl_linear_weight, onednn_linear_weight
from stator.ops.table import POINTWISE, RULES, VIEW_RULES
from stator.passes.freezing.measure import Ways, fastest, in_words
from stator.passes.freezing.take_constants import constant_nodes
from stator.torch_api import is_view_op, size_hint

aten = torch.ops.aten

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
OTHERS: Final = (aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
NO_ROW: Final = "what it adds is no row"
LEAST: Final = 1 << 16  # elements of the weight: a smaller one is packed in no time
# Of a larger product a part of that size is measured: it takes seconds, and has the same verdict.
MOST_ROWS: Final = 1024
MOST_WIDTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """What the time of a product depends on."""

    rows: int
    depth: int
    width: int
    dtype: torch.dtype
    biased: bool
    by_rows: bool  # the weight lies so
    is_fixed: bool  # there are always so many rows


@dataclass(frozen=True, slots=True)
class Linear:
    """A product x @ w.t() + bias in the graph."""

    node: fx.Node
    x: fx.Node
    turned: fx.Node  # w.t(), of size depth, width
    bias: fx.Node | None

    @property
    def shape(self) -> Shape | str:
        """What its time depends on; the reason, if it cannot be packed."""
        x, turned = self.x.meta["val"], self.turned.meta["val"]
        if x.device.type != "cpu" or x.dtype not in FLOATS or turned.dtype is not x.dtype:
            return "it is not of one type of floats on the CPU"
        rows, depth = x.size()
        hint = rows if isinstance(rows, int) else size_hint(rows)
        if not isinstance(depth, int) or hint is None:
            return "its sizes are not known"
        if depth * turned.size(1) < LEAST or not hint:
            return "its weight is small"
        if not x.is_contiguous():
            return "its rows do not lie one behind the other"
        if self.bias is not None and self.bias.meta["val"].size() != turned.size()[1:]:
            return NO_ROW  # a single number, say: libraries read as many as there are columns
        by_rows = turned.stride() == (1, depth)
        biased, fixed = self.bias is not None, isinstance(rows, int)
        return Shape(hint, depth, turned.size(1), x.dtype, biased, by_rows, fixed)


def pack_linear(graph: fx.Graph, ctx: Ctx) -> int:
    """Let products read packed weights; return how many do.

    before: y = addmm(bias, x, t(w))                    w: a weight
    after:  y = _mkl_linear(x, mkl_linear_weight(w, 128), w, bias, 128)
    """
    settled = constant_nodes(graph)
    if not settled:
        return 0
    packed = 0
    for node in list(graph.nodes):
        linear = _linear(node)
        if linear is None and (reason := _why_no_linear(node, settled)) is not None:
            ctx.record.notes.append(f"{node.name} not packed: {reason}")
        if linear is None or linear.turned not in settled:
            continue
        way, reason = _way(linear, discards=ctx.options.discard_parameters)
        words = (f"reads its weight packed by {way}", "not packed")
        if ctx.may("pack_linear", node, reason, words):
            _rewrite(linear, way)
            packed += 1
    return packed


def _linear(node: fx.Node) -> Linear | None:
    """The node as a product, if it is one."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.mm.default:
        return Linear(node, node.args[0], node.args[1], None)
    if node.target is aten.addmm.default and node.args[0].meta["val"].dim() == 1:
        return Linear(node, node.args[1], node.args[2], node.args[0])
    return None


def _why_no_linear(node: fx.Node, settled: Collection[fx.Node]) -> str | None:
    """Why another product with a weight cannot be packed; None if the node is no such."""
    if node.target not in OTHERS or node.args[-1] not in settled:
        return None
    if node.target is not aten.addmm.default:
        return "libraries pack no batches of matrices"
    return "its parts are scaled" if node.kwargs else NO_ROW


def _way(linear: Linear, *, discards: bool) -> tuple[str, str | None]:
    """How the product is fastest; the reason, if that is as it stands.

    `discards`: the weight goes when it is packed, and MKL's product would hold on to it.
    """
    shape = linear.shape
    if isinstance(shape, str):
        return "", shape
    part = replace(shape, rows=min(shape.rows, MOST_ROWS), width=min(shape.width, MOST_WIDTH))
    way, seconds = fastest(part, lambda: _ways(part))
    if discards and "oneDNN" in seconds and way == "MKL":
        way = "oneDNN"
    if way == "plain":
        return way, f"it is no faster ({in_words(seconds)})"
    return way, None


def _ways(shape: Shape) -> Ways:
    x = torch.full((shape.rows, shape.depth), 0.5, dtype=shape.dtype)
    weight = torch.full((shape.width, shape.depth), 0.5, dtype=shape.dtype)
    turned = weight.t() if shape.by_rows else weight.t().contiguous()
    bias = torch.zeros(shape.width, dtype=shape.dtype) if shape.biased else None
    out = torch.empty(shape.rows, shape.width, dtype=shape.dtype)

    def plain() -> object:
        if bias is None:
            return torch.mm(x, turned, out=out)
        return torch.addmm(bias, x, turned, out=out)

    ways: dict[str, Callable[[], object]] = {}
    mkl, onednn = mkl_linear(), onednn_linear()
    if mkl is not None and shape.is_fixed and shape.dtype is torch.float32:
        for_mkl = mkl_linear_weight(weight, shape.rows)
        ways["MKL"] = lambda: mkl(x, for_mkl, weight, bias, shape.rows)
    if onednn is not None:
        with suppress(RuntimeError):  # float16 takes a newer processor
            for_onednn = onednn_linear_weight(weight, shape.rows if shape.is_fixed else None)
            ways["oneDNN"] = lambda: onednn(x, for_onednn, bias, "none", [], "")
    return {**ways, "plain": plain}


def _rewrite(linear: Linear, way: str) -> None:
    graph, shape = linear.node.graph, linear.shape
    assert isinstance(shape, Shape), "it was looked at before"
    rows = shape.rows if shape.is_fixed else None
    pack = mkl_linear_weight if way == "MKL" else onednn_linear_weight
    with graph.inserting_before(linear.node):
        weight = graph.call_function(aten.t.default, (linear.turned,))
        weight.meta = {"val": linear.turned.meta["val"].t()}
        packed = graph.call_function(pack, (weight, rows))
        packed.meta = {"val": weight.meta["val"]}  # its sizes; nobody but the library reads it
        if way == "MKL":
            # MKL adds to what is there: the bias is laid out row by row before.
            apart = linear.bias is not None and _is_read_by_kernels(linear.node)
            bias = None if apart else linear.bias
            product = graph.call_function(mkl_linear(), (linear.x, packed, weight, bias, rows))
            product.meta = dict(linear.node.meta)
            if apart:
                product = graph.call_function(aten.add.Tensor, (product, linear.bias))
        else:
            arguments: tuple[Any, ...] = (linear.x, packed, linear.bias, "none", [], "")
            product = graph.call_function(onednn_linear(), arguments)
    product.meta = dict(linear.node.meta)
    linear.node.replace_all_uses_with(product)
    graph.erase_node(linear.node)


def _is_read_by_kernels(node: fx.Node) -> bool:
    """Whether all that read it are kernels, which add a bias in passing."""
    readers = list(node.users)
    while readers:
        reader = readers.pop()
        if reader.target in VIEW_RULES and is_view_op(reader.target):
            readers += reader.users
        elif not any(reader.target in table for table in (POINTWISE, RULES)):
            return False
    return True
