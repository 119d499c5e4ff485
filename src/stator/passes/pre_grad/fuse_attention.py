"""Attention, however it is spelled, becomes torch's own: one kernel, forward and backward.

The pass reads what a product with a softmax means (`read_attention`), so that it needs no pattern
for each spelling.  Since it runs before differentiation, training and inference are one rule.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.backends import cuda

from stator.graph.build import Builder
from stator.graph.run import Ctx
from stator.graph.torch_calls import VALUE, is_written_between, value_of
from stator.passes.pre_grad.read_attention import Added, Attention, Filled, read_attention
from stator.passes.pre_grad.settle_attention import settle_attention

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
SCORES_ARE_LOST: Final = -1e18  # beside such a number, even in float64


def fuse_attention(graph: fx.Graph, ctx: Ctx) -> int:
    """Rewrite every attention that is found; return how many.

    before: y = softmax(q @ k.mT / 8 + mask, -1) @ v
    after:  y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / 8)
    """
    if not ctx.options.kernels:  # torch is to run what the program says
        return 0
    fused = 0
    for node in list(graph.nodes):
        found = None if node._erased else read_attention(node)
        if found is None:
            continue
        reason = found if isinstance(found, str) else why_not_fused(found)
        if reason is None and isinstance(found, Attention):
            if not ctx.fuel.spend(f"fuse_attention: {node.name}"):
                continue
            reason = _fuse(found, graph)
            fused += reason is None
        if reason is not None:
            ctx.record.notes.append(f"{node.name} is not fused to attention: {reason}")
    return fused + settle_attention(graph, ctx)


def why_not_fused(found: Attention) -> str | None:
    """None if torch's attention computes the same; otherwise the reason, for the log."""
    values = [value_of(operand.node) for operand in (found.q, found.k, found.v)]
    if not all(isinstance(value, Tensor) for value in values):
        return "the values are not known"
    kinds = {(value.dtype, value.device) for value in values}
    if len(kinds) > 1:
        return "q, k and v are of different types"
    if values[0].device.type == "cuda" and values[0].dtype is torch.float32:
        return "in float32 a GPU's kernels are less exact than the steps"  # three times, measured
    if values[0].dtype not in FLOATS:
        return f"{values[0].dtype} is not for torch's attention"
    return _why_not_masked(found, values[0]) or _why_written(found)


def _why_not_masked(found: Attention, q: Tensor) -> str | None:
    for one in found.masks:
        mask = value_of(one.node)
        kinds = _summands_for(q) if isinstance(one, Added) else (torch.bool,)
        if not isinstance(mask, Tensor) or mask.device != q.device or mask.dtype not in kinds:
            return f"{one.node.name} is no mask for {q.dtype}"
    return None


def _summands_for(q: Tensor) -> tuple[torch.dtype, ...]:
    """Types of what may be added to scores: kernels of GPUs take that of the operands alone."""
    return (q.dtype,) if q.device.type == "cuda" else (q.dtype, torch.float32)


def _why_written(found: Attention) -> str | None:
    if is_written_between(min(found.inner), found.node, besides=set(found.inner)):
        return "one of its values may be written to meanwhile"
    return None


def _fuse(found: Attention, graph: fx.Graph) -> str | None:
    """Replace it; otherwise the reason."""
    builder = Builder(graph, found.node, key=VALUE)
    operands = [operand.node for operand in (found.q, found.k, found.v)]
    masks = [one.node for one in found.masks]
    try:
        new = builder.run(_Built(found).attention, operands, masks, found.factors)
    except (RuntimeError, IndexError) as error:
        builder.take_back()
        return f"its sizes do not go together: {error}"
    was, now = value_of(found.node), value_of(new)
    reason = _why_no_kernel(builder)
    if reason is None and _described(was) != _described(now):
        reason = f"{_described(was)} would become {_described(now)}"
    if reason is not None:
        builder.take_back()
        return reason
    found.node.replace_all_uses_with(new)
    for node in (found.node, *reversed(sorted(set(found.inner)))):
        if not node.users and not node._erased:
            graph.erase_node(node)
    return None


def _why_no_kernel(builder: Builder) -> str | None:
    """None if torch has one kernel for the attention that was built, or nobody can say yet.

    On a GPU it may have none; then it multiplies matrices, of half precision in float32.  Asked
    with fake tensors it is right where something is differentiated, and only there.
    """
    (call,) = (n for n in builder.added if n.target is F.scaled_dot_product_attention)
    q, k, v = (value_of(node) for node in call.args)
    mask, dropout = value_of(call.kwargs["attn_mask"]), call.kwargs["dropout_p"]
    tensors = [value for value in (q, k, v, mask) if isinstance(value, Tensor)]
    is_trained = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
    if q.device.type != "cuda" or not is_trained:
        return None
    asked = cuda.SDPAParams(q, k, v, mask, dropout, False, False)
    ways = (cuda.can_use_flash_attention, cuda.can_use_efficient_attention)
    try:
        if any(way(asked) for way in (*ways, cuda.can_use_cudnn_attention)):
            return None
    except RuntimeError as error:  # torch was built for GPUs, and there is no driver
        return f"torch cannot say whether it has a kernel: {str(error).splitlines()[0]}"
    return "none of torch's kernels for it takes these operands"


def _described(value: Tensor) -> str:
    sizes = f"{value.dtype}{list(value.size())}"
    return f"{sizes}, strides {list(value.stride())}, on {value.device}"


@dataclass(frozen=True, slots=True)
class _Built:
    """The one call, and what it takes before and after."""

    found: Attention

    def attention(self, operands: list[Any], masks: list[Any], factors: list[Any]) -> Any:
        found = self.found
        q, k, v = (
            operand.laid_out(value)
            for operand, value in zip((found.q, found.k, found.v), operands, strict=True)
        )
        for factor, divides in factors:
            q = q / factor if divides else q * factor
        if found.batch is not None:
            q, k, v = (one.reshape(*found.batch, *one.shape[-2:]) for one in (q, k, v))
        heads = q.ndim == 3  # torch's fast path wants them
        if heads:
            q, k, v = (one.unsqueeze(1) for one in (q, k, v))
        batch = torch.broadcast_shapes(*(one.shape[:-2] for one in (q, k, v)))
        q, k, v = (
            one if one.shape[:-2] == batch else one.expand(*batch, *one.shape[-2:])
            for one in (q, k, v)
        )
        masks = [_as_wide_as_scores(mask, heads) for mask in masks]
        q, mask, alive = self._masked(q, masks)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=found.dropout, scale=found.scale
        )
        if alive is not None:  # a softmax of nothing is NaN
            replaced = mask.dtype is torch.bool  # no gradient goes through that; where -inf was
            dead = torch.where(alive, 1.0, math.nan).to(out.dtype)  # added, NaN does
            out = torch.where(alive, out, math.nan) if replaced else out * dead
        out = out.squeeze(1) if heads else out
        if found.out_order is not None:
            out = out.permute(*found.out_order)
        was = value_of(found.node)
        out = out if out.ndim == was.ndim else out.reshape(*was.size())
        return out if str(out.value.stride()) == str(was.stride()) else out.contiguous()

    def _mask(self, masks: list[Any], dtype: torch.dtype) -> Any:
        """All masks as one: of bools if it can be, otherwise to be added."""
        known = self.found.masks
        first = known[0] if len(known) == 1 else None
        if isinstance(first, Filled) and first.value == -math.inf:
            return _open(first, masks[0])
        whole: Any = None
        for one, mask in reversed(list(zip(known, masks, strict=True))):
            if isinstance(one, Added):
                mask = mask if one.factor == 1 else mask * one.factor
                whole = mask if whole is None else whole + mask
            else:
                other: Any = 0.0 if whole is None else whole
                chosen = (one.value, other) if one.where else (other, one.value)
                whole = torch.where(mask, *chosen)
        if whole is not None and whole.dtype not in (dtype, torch.float32):
            whole = whole.to(dtype)
        return whole

    def _masked(self, q: Any, masks: list[Any]) -> tuple[Any, Any, Any]:
        """q and the mask for torch's attention, and which rows see something, if any may not.

        Its backward takes the softmax from the logarithm of a sum, which is lost beside a mask of
        -1e30.  So rows are shifted until their largest mask is 0, which a softmax does not see.
        Where that was so low that the scores beside it were lost, they are 0.
        """
        mask = self._mask(masks, q.dtype)
        if mask is None:
            return q, None, None
        if mask.dtype is torch.bool:
            return q, mask, mask.any(-1, keepdim=True)
        highest = mask.detach().amax(-1, keepdim=True)
        alive = highest > -math.inf
        highest = torch.where(alive, highest, 0.0)
        q = self._asking(q, masks)
        q = torch.where(highest < SCORES_ARE_LOST, q - q.detach(), q)
        mask = mask - highest
        mask = mask if mask.dtype in _summands_for(q.value) else mask.to(q.dtype)
        return q, mask, alive if self.found.may_be_dead else None

    def _asking(self, q: Any, masks: list[Any]) -> Any:
        """q with nothing in rows whose scores are all replaced: no gradient goes through those."""
        known = self.found.masks
        if not any(isinstance(one, Filled) for one in known):
            return q
        rows = [_open(one, mask) for one, mask in zip(known, masks, strict=True)]
        asks = reduce(operator.and_, rows).any(-1, keepdim=True)
        return torch.where(asks, q, 0.0)


def _as_wide_as_scores(mask: Any, heads: bool) -> Any:
    """A mask of two or four dimensions, as torch's fast path wants it."""
    if heads and mask.ndim == 3:
        return mask.unsqueeze(1)
    while mask.ndim not in (2, 4):
        mask = mask.unsqueeze(0)
    return mask


def _open(one: Added | Filled, mask: Any) -> Any:
    """Where a mask lets scores through."""
    if isinstance(one, Added):
        return mask != -math.inf
    return mask.logical_not() if one.where else mask
