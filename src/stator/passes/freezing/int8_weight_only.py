"""Products with weights of int8, the inputs being of half precision: integers are read, not copies.

Torch's kernel reads half of the bytes and takes half of the time, from one row to many; that for
float32 takes ten times as long as a product of floats, and is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.passes.freezing.quantized import TURNS, moved

aten = torch.ops.aten

HALVES: Final = (torch.bfloat16, torch.float16)
VIEWS: Final = (aten.view.default, aten._unsafe_view.default)
DEPTH: Final = 32  # a divisor of the depth: of others, the kernel makes errors or crashes


@dataclass(frozen=True, slots=True)
class Scaled:
    """x @ w.t() * scales."""

    nodes: tuple[fx.Node, ...]  # the product, views of it, the multiplication
    weight: fx.Node  # int8, rows being channels
    scales: fx.Node


def int8_weight_only(graph: fx.Graph, ctx: Ctx) -> int:
    """Let products read weights of int8 as they are; return how many do.

    before: y = mm(x, _to_copy(t(w), bf16)) * s                       w: i8, x and s: bf16
    after:  y = _weight_int8pack_mm(x, w, s)
    """
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        weight = _integers(node.args[1])
        if weight is None:
            continue
        found = _why_not(node, weight) or _scaled(node, weight)
        if isinstance(found, str):
            ctx.record.notes.append(f"{node.name} is not int8: {found}")
        elif ctx.fuel.spend(f"int8_weight_only: {node.name}"):
            ctx.record.notes.append(f"{node.name} reads its weight as int8")
            _rewrite(found)
            changed += 1
    drop_unread(graph)
    return changed


def _integers(read: Any) -> fx.Node | None:
    """The integers that a turned weight is cast from; None if it is none."""
    node, turns = read, 0
    while node.target in TURNS or node.target is aten._to_copy.default:
        is_turn = node.target in TURNS
        if node.meta["val"].dim() != 2 or (not is_turn and set(node.kwargs) != {"dtype"}):
            return None
        turns, node = turns + is_turn, node.args[0]
    is_weight = node is not read and node.meta["val"].dtype is torch.int8 and turns % 2 == 1
    return node if is_weight else None


def _why_not(node: fx.Node, weight: fx.Node) -> str | None:
    x = node.args[0].meta["val"]
    integers = weight.meta["val"]
    if x.dtype not in HALVES or x.device.type != "cpu":
        return "its input is not of half precision on the CPU"
    if not x.is_contiguous() or not integers.is_contiguous():
        return "an operand does not lie row by row"
    depth = integers.size(1)
    if not isinstance(depth, int) or depth % DEPTH or 0 in (x.size(0), depth, integers.size(0)):
        return f"its depth, {depth}, is no multiple of {DEPTH}, or it is empty"
    return None


def _scaled(node: fx.Node, weight: fx.Node) -> Scaled | str:
    """The product with its scales; the reason, if it has none."""
    nodes, width = [node], weight.meta["val"].size(0)
    while len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        nodes.append(user)
        if user.target not in VIEWS or user.meta["val"].size(-1) != width:
            break
    factors = [arg for arg in nodes[-1].args if arg is not nodes[-2]] if len(nodes) > 1 else []
    if nodes[-1].target is not aten.mul.Tensor or not factors:
        return "nothing multiplies it by scales"
    (scales,) = factors
    if not isinstance(scales, fx.Node) or not _is_row(scales.meta["val"], node.meta["val"], width):
        return "what it is multiplied by is no number for each channel"
    return Scaled(tuple(nodes), weight, scales)


def _is_row(scales: torch.Tensor, product: torch.Tensor, width: int) -> bool:
    """Whether there is a number for each column."""
    has_width = scales.dim() > 0 and scales.size(-1) == width and scales.numel() == width
    return bool(has_width and scales.dtype == product.dtype)


def _rewrite(found: Scaled) -> None:
    product, *views, last = found.nodes
    builder = Builder(product.graph, last)
    scales = found.scales
    if scales.meta["val"].dim() > 1:
        scales = builder.call(aten.reshape.default, scales, [scales.meta["val"].numel()])
    made = builder.call(aten._weight_int8pack_mm.default, product.args[0], found.weight, scales)
    last.replace_all_uses_with(moved(made, views, builder))
    for node in reversed(found.nodes):
        node.graph.erase_node(node)
