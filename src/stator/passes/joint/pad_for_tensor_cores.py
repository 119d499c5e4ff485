"""Products on a GPU whose rows begin at odd places are padded for its tensor cores.

They take 16 bytes at once.  Where the rows of an operand or of the result begin elsewhere, a
library has kernels of a third of the speed or less: of 8191x4095x4095 in bfloat16, a quarter.
Sizes along which memory runs are padded, with nothing; others may be odd.  That costs copies of the
operands, and of the result unless kernels of ours read it, and pays where multiplying is most of
the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.run import Ctx
from stator.torch_api import size_hint

aten = torch.ops.aten

AT_ONCE: Final = 16  # bytes
# How many times as fast an aligned product is, and floating-point operations of tensor cores while
# memory moves a byte: of an H200, in proportions that other cards of its kind have too.
GAIN: Final = {torch.bfloat16: 3.0, torch.float16: 3.0, torch.float32: 2.0}
FLOPS_A_BYTE: Final = {torch.bfloat16: 150, torch.float16: 150, torch.float32: 75}
LAUNCH: Final = 1 << 24  # bytes that memory moves while a kernel is started
WORTH: Final = 1.5  # times the cost that has to be won: neither is known well


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes of a product on a GPU, and whether operands lie by rows; else by columns."""

    batch: int  # this and what follows of the first call, where it varies
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype
    left_by_rows: bool = True
    right_by_rows: bool = True

    @staticmethod
    def of(node: fx.Node) -> Product | str:
        """A product; the reason, if it is none that could be padded."""
        left, right = (arg.meta["val"] for arg in node.args[-2:])
        if left.dtype not in GAIN or right.dtype is not left.dtype:
            return f"{left.dtype} is not for tensor cores"
        if left.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
            return "float32 is multiplied without tensor cores"
        sizes = (*left.size()[-2:], right.size(-1))
        batch = _hint(left.size(0)) if left.ndim == 3 else 1
        rows, depth, columns = map(_hint, sizes)
        if not batch * rows * depth * columns:
            return "its sizes are not known"
        lies = [_lies_by_rows(left), _lies_by_rows(right)]
        if None in lies:
            return "an operand lies neither by rows nor by columns"
        by_rows = bool(lies[0]), bool(lies[1])
        product = Product(batch, rows, depth, columns, left.dtype, *by_rows)
        for along, size in zip(product.along, sizes, strict=True):
            if along and not isinstance(size, int):
                return "a size varies along which memory runs"
        return product

    @property
    def along(self) -> tuple[bool, bool, bool]:
        """Whether memory runs along rows, depth and columns; the result lies by rows."""
        return not self.left_by_rows, self.left_by_rows or not self.right_by_rows, True

    @property
    def extra(self) -> tuple[int, int, int]:
        """How many rows, how much depth and how many columns are missing."""
        step = AT_ONCE // self.dtype.itemsize
        sizes = (self.rows, self.depth, self.columns)
        rows, depth, columns = (
            -size % step if along else 0 for size, along in zip(sizes, self.along, strict=True)
        )
        return rows, depth, columns

    @property
    def gain(self) -> float:
        """Bytes that could be moved in the time that is won; none where memory takes longest."""
        flops = 2 * self.batch * self.rows * self.depth * self.columns
        work = flops / FLOPS_A_BYTE[self.dtype]
        places = self.rows * self.depth + self.depth * self.columns + self.rows * self.columns
        moved = self.batch * places * self.dtype.itemsize
        return float(max(GAIN[self.dtype] * work, moved) - max(work, moved))

    def cost(self, cuts_for_nothing: bool) -> int:
        """Bytes that are moved for it."""
        rows, depth, columns = self.extra
        copied = []
        if rows or depth:
            copied.append(self.rows * self.depth)
        if depth or columns:
            copied.append(self.depth * self.columns)
        if columns and not cuts_for_nothing:
            copied.append(self.rows * self.columns)
        return 2 * self.batch * sum(copied) * int(self.dtype.itemsize) + LAUNCH * len(copied)


def _lies_by_rows(value: torch.Tensor) -> bool | None:
    """Whether memory runs along rows; None if not along columns either, or nobody knows."""
    across, down = (isinstance(n, int) and n == 1 for n in (value.stride(-1), value.stride(-2)))
    return across or (False if down else None)


def _hint(size: int | torch.SymInt) -> int:
    """The size of the first call, more than 1 if it varies; 0 if nobody knows."""
    if isinstance(size, int):
        return size
    hint = size_hint(size)
    return max(hint, 2) if hint else 0


def _has_odd_sizes(node: fx.Node) -> bool:
    values = [arg.meta["val"] for arg in node.args[-2:]]
    step = AT_ONCE // values[0].dtype.itemsize
    sizes = (size for value in values for size in value.size()[-2:])
    return any(isinstance(size, int) and size % step for size in sizes)


def pad_for_tensor_cores(node: fx.Node, ctx: Ctx, *, cuts_for_nothing: bool) -> int:
    """Pad one product where the model says that it pays; 1 if so.

    `cuts_for_nothing`: all that read the result are loops, which leave out what is too much.

    before: y = mm(x, w)                        x: bf16[8191, 4095], w: bf16[4095, 4097]
    after:  y = slice(mm(pad(x, [0, 1]), pad(w, [0, 7, 0, 1])), -1, 0, 4097)
    """
    product = Product.of(node)
    if not (_has_odd_sizes(node) if isinstance(product, str) else any(product.extra)):
        return 0
    reason = product if isinstance(product, str) else why_not_padded(product, cuts_for_nothing)
    if isinstance(product, str) or reason is not None:
        ctx.record.notes.append(f"{node.name} is not padded: {reason}")
        return 0
    if not ctx.fuel.spend(f"pad_mm: {node.name}"):
        return 0
    rows, depth, columns = product.extra
    ctx.record.notes.append(
        f"{node.name} is padded by {rows} rows, {depth} in depth and {columns} columns"
    )
    _pad(node, product)
    return 1


def why_not_padded(product: Product, cuts_for_nothing: bool) -> str | None:
    """None if padding should pay; otherwise the reason, for the log."""
    cost = product.cost(cuts_for_nothing)
    if product.gain < WORTH * cost:
        return f"copies of {cost} bytes cost about what is won"
    return None


def _pad(node: fx.Node, product: Product) -> None:
    rows, depth, columns = product.extra

    def built(*arguments: Any) -> Any:
        *bias, left, right = arguments
        added = [_wider_bias(one, rows, columns) for one in bias]
        left = _wider(left, rows, depth, product.left_by_rows)
        right = _wider(right, depth, columns, product.right_by_rows)
        result = node.target(*added, left, right, **node.kwargs)
        if rows:
            result = aten.slice.Tensor(result, -2, 0, product.rows)
        if columns:
            result = aten.slice.Tensor(result, -1, 0, product.columns)
        if columns or (rows and product.batch > 1):  # rows of one are cut off in one piece
            return aten.clone.default(result, memory_format=torch.contiguous_format)
        return result

    new = Builder(node.graph, node).run(built, *node.args)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _wider(value: Any, rows: int, columns: int, by_rows: bool) -> Any:
    """An operand with more rows and columns, in memory as before."""
    if not rows and not columns:
        return value
    if by_rows:
        return aten.constant_pad_nd.default(value, [0, columns, 0, rows])
    turned = aten.transpose.int(value, -2, -1)
    wider = aten.constant_pad_nd.default(turned, [0, rows, 0, columns])
    return aten.transpose.int(wider, -2, -1)


def _wider_bias(bias: Any, rows: int, columns: int) -> Any:
    """A summand of a product, as wide as that; what is broadcast stays."""
    right = columns if columns and bias.shape[-1] != 1 else 0
    below = rows if rows and bias.ndim == 2 and bias.shape[0] != 1 else 0
    if not right and not below:
        return bias
    return aten.constant_pad_nd.default(bias, [0, right, 0, below][: 2 * bias.ndim])
