"""Attention on a GPU by the kernel that eager takes, where nothing is differentiated.

Traced with fake tensors, torch's choice among its kernels finds none for inference, and attention
would become products of matrices in float32: several times slower than eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from math import sqrt
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from stator.graph.run import Ctx
from stator.graph.torch_calls import value_of
from stator.torch_api import size_hint, unset_fake_temporarily

aten = torch.ops.aten
How: TypeAlias = tuple[float, bool, float | None]  # dropout, whether it is causal, the scale
# As programs call it, and as torch.export writes it down.
_SPELLINGS: Final = (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
HEAD_STEP: Final = 8  # widths of heads that flash attention takes as they are
MASK_STEP: Final = 16  # elements that rows of a mask may be apart


def settle_attention(graph: fx.Graph, ctx: Ctx) -> int:
    """Call the kernel itself; return how often.

    before: y = scaled_dot_product_attention(q, k, v)
    after:  y = by_cudnn(q, k, v, None, (0.0, False, None))
    """
    settled = 0
    nodes = (graph.find_nodes(op="call_function", target=target) for target in _SPELLINGS)
    for node in chain.from_iterable(nodes):
        given = {**dict(zip(NAMES, node.args, strict=False)), **node.kwargs}
        operands = tuple(given.get(name) for name in NAMES[:4])
        how = (given.get("dropout_p", 0.0), given.get("is_causal", False), given.get("scale"))
        if any(isinstance(value, fx.Node) for value in how):
            continue
        kernel = _kernel_of(operands, how, grouped=given.get("enable_gqa", False))
        if kernel is not None and ctx.fuel.spend(f"attention: {node.name}"):
            node.target, node.args, node.kwargs = kernel, (*operands, how), {}
            settled += 1
    return settled


def _kernel_of(
    operands: tuple[Any, ...], how: How, *, grouped: bool
) -> Callable[..., Tensor] | None:
    """What eager would call; None where that is not for us to say."""
    values = [_value(node) for node in operands]
    if not all(_is_on_gpu(value) for value in values if value is not None):
        return None
    tensors = [value for value in values if value is not None]
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        return None
    if not torch.cuda.is_available():  # a package is built where no card is
        return None
    with unset_fake_temporarily(), torch.no_grad():  # of fake tensors the choice sees no device
        real = [_real(value) for value in tensors]
        if any(tensor is None for tensor in real):
            return None
        q, k, v, mask = (*real, None) if len(real) == 3 else real
        dropout, is_causal, scale = how
        ask = aten._fused_sdp_choice.default
        bias = _bias(mask, q, k)
        choice = ask(q, k, v, bias, dropout, is_causal, scale=scale, enable_gqa=grouped)
    return KERNELS.get(int(choice))


def _value(node: Any) -> Any:
    """What Dynamo or torch.export says that an operand is."""
    found = value_of(node)
    return node.meta.get("val") if found is None and isinstance(node, fx.Node) else found


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda" and value.ndim == 4


def _real(value: Tensor) -> Tensor | None:
    """A tensor that lies the same way, to ask with; None where sizes depend on data."""
    numbers = [*value.size(), *value.stride()]
    known = [size_hint(n) if isinstance(n, torch.SymInt) else n for n in numbers]
    if any(number is None for number in known):
        return None
    size, stride = known[: value.ndim], known[value.ndim :]
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to scores, for all of them, in rows that begin where kernels want them to."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        nothing = torch.zeros([], dtype=q.dtype, device=q.device)
        mask = torch.where(mask, nothing, float("-inf"))
    length = mask.size(-1)
    rows = F.pad(mask.to(q.dtype), (0, -length % MASK_STEP)).contiguous()[..., :length]
    return rows.expand(q.size(0), q.size(1), q.size(2), k.size(2))


def by_flash(q: Any, k: Any, v: Any, mask: Any, how: How) -> Tensor:
    """Flash attention; heads are padded as eager pads them, which changes no score."""
    dropout, is_causal, scale = how
    attend = aten._scaled_dot_product_flash_attention.default
    width = q.size(-1)
    if missing := -width % HEAD_STEP:
        q, k, v = (F.pad(operand, (0, missing)) for operand in (q, k, v))
        scale = 1 / sqrt(width) if scale is None else scale
    result: Tensor = attend(q, k, v, dropout, is_causal, scale=scale)[0]
    return result.narrow(-1, 0, width) if missing else result


def by_blocks(q: Any, k: Any, v: Any, mask: Any, how: How) -> Tensor:
    """Memory-efficient attention."""
    dropout, is_causal, scale = how
    attend = aten._scaled_dot_product_efficient_attention.default
    bias = _bias(mask, q, k)
    result: Tensor = attend(q, k, v, bias, False, dropout, is_causal, scale=scale)[0]
    return result


def by_cudnn(q: Any, k: Any, v: Any, mask: Any, how: How) -> Tensor:
    """The attention of NVIDIA's library."""
    dropout, is_causal, scale = how
    attend = aten._scaled_dot_product_cudnn_attention.default
    bias = _bias(mask, q, k)
    result: Tensor = attend(q, k, v, bias, False, dropout, is_causal, scale=scale)[0]
    return result


# By torch's numbers for them; 0, products of matrices, is left as it stands.
KERNELS: Final[Mapping[int, Callable[..., Tensor]]] = {1: by_flash, 2: by_blocks, 3: by_cudnn}
