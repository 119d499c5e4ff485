"""Products whose rows begin at odd addresses get wider rows: on a CPU those of little depth.

A CPU's library packs its operands but writes the result row by row; where few multiplications stand
behind each element, rows that straddle cache lines cost up to a third.  Wider rows are cut off
again by whoever reads the result, which costs nothing if that is a kernel of ours.
`benchmarks/pad_mm.py` measures the model (RESULTS.md has the verdicts for 40 shapes).  A GPU has a
model of its own, in `pad_for_tensor_cores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.run import Ctx
from stator.ops.table import POINTWISE
from stator.passes.joint.pad_for_tensor_cores import pad_for_tensor_cores
from stator.torch_api import is_view_op

aten = torch.ops.aten

PRODUCTS: Final = (aten.mm.default, aten.addmm.default, aten.bmm.default)
LINE: Final = 64  # bytes of a cache line
LEAST: Final = 1 << 18  # elements of the result: a smaller one stays in the cache
DEEPEST: Final = 128  # beyond that, multiplying takes longer than writing
ROWS_PER_DEPTH: Final = 8  # fewer rows than that times the depth: copying costs what is won


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product."""

    batch: int
    rows: int
    depth: int
    columns: int
    itemsize: int

    @property
    def wide(self) -> int:
        """So many columns that every row begins at a cache line."""
        step = LINE // self.itemsize
        return -(-self.columns // step) * step


def pad_mm(graph: fx.Graph, ctx: Ctx) -> int:
    """Widen the products that gain by it; return how many.

    before: y = relu(mm(x, w))                          x: f32[4096, 64], w: f32[64, 1001]
    after:  y = relu(slice(mm(x, pad(w, [0, 7])), -1, 0, 1001))
    """
    widened = 0
    for target in PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            if node.meta["val"].device.type == "cuda":
                free = why_not_read(node) is None
                widened += pad_for_tensor_cores(node, ctx, cuts_for_nothing=free)
                continue
            product = product_of(node)
            if product is None or product.wide == product.columns:
                continue
            reason = why_not_padded(product) or why_not_read(node)
            words = (f"is padded to {product.wide} columns", "is not padded")
            if ctx.may("pad_mm", node, reason, words):
                widen(node, product)
                widened += 1
    return widened


def product_of(node: fx.Node) -> Product | None:
    """The sizes, if the node is a product on the CPU whose sizes are known."""
    right = node.meta["val"]
    if right.device.type != "cpu" or right.dtype not in (torch.float32, torch.float64):
        return None
    left, other = (arg.meta["val"] for arg in node.args[-2:])
    sizes = (*left.size(), *other.size())
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    batch = left.size(0) if left.ndim == 3 else 1
    rows, depth = left.size()[-2:]
    return Product(batch, rows, depth, other.size(-1), right.element_size())


def why_not_padded(product: Product) -> str | None:
    """None if wider rows should pay; otherwise the reason, for the log."""
    if product.wide == product.columns:
        return "its rows are aligned"
    if product.depth > DEEPEST:
        return f"at a depth of {product.depth}, writing is the smaller part"
    if product.batch * product.rows * product.columns < LEAST:
        return "its result is small"
    if product.rows < ROWS_PER_DEPTH * product.depth:
        return f"{product.rows} rows are too few to pay for a copy of the right operand"
    return None


def why_not_read(node: fx.Node) -> str | None:
    """None if all readers are loops, which cut rows off for nothing."""
    for reader in node.users:
        inner = reader.users if is_view_op(reader.target) else [reader]
        for one in inner:
            if one.target not in POINTWISE:
                return f"{one.name} reads it, and wants it in one piece"
    return None


def widen(node: fx.Node, product: Product) -> None:
    """Let a product have wider rows, and its readers the part that they know."""
    extra = product.wide - product.columns

    def built(*arguments: Any) -> Any:
        *bias, left, right = arguments
        added = [_padded(one, extra) if one.shape[-1] != 1 else one for one in bias]
        product_ = node.target(*added, left, _padded(right, extra), **node.kwargs)
        cut = aten.slice.Tensor(product_, -1, 0, product.columns)
        return aten.clone.default(cut, memory_format=torch.contiguous_format)

    new = Builder(node.graph, node).run(built, *node.args)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _padded(value: Any, extra: int) -> Any:
    return aten.constant_pad_nd.default(value, [0, extra])
