"""Weights in the layouts that libraries read fastest: made once, read at every call.

Graphs call these functions on weights alone, so that they become recipes of constants.  What they
return is the library's own; only its own operators read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stator.ops.libraries import pack_convolution, pack_for_mkl, pack_for_onednn


def mkl_linear_weight(weight: Tensor, rows: int) -> Tensor:
    """`weight`, whose rows are outputs, for MKL's product with so many rows."""
    return pack_for_mkl(weight.contiguous(), rows)


def onednn_linear_weight(weight: Tensor, rows: int) -> Tensor:
    """The same for oneDNN's product."""
    return pack_for_onednn(weight.contiguous(), rows)


def onednn_convolution_weight(
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    image: Sequence[int],
) -> Tensor:
    """`weight` for oneDNN's convolution with images of one size."""
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    laid = weight.contiguous(memory_format=last) if weight.dim() > 3 else weight.contiguous()
    return pack_convolution(laid, padding, stride, dilation, groups, image)


PACKS: Final = frozenset({mkl_linear_weight, onednn_linear_weight, onednn_convolution_weight})
