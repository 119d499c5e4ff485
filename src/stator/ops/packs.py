"""Weights in the layouts that libraries read fastest: made once, read at every call.

Graphs call these functions on weights alone, so that they become recipes of constants.  What they
return is the library's own; only its own operators read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from stator.ops.libraries import (
    convolution_packer,
    int8_convolution_packer,
    int8_linear_packer,
    pack_for_mkl,
    pack_for_onednn,
    pack_lstm,
    transposed_convolution_packer,
)


def mkl_linear_weight(weight: Tensor, rows: int) -> Tensor:
    """`weight`, whose rows are outputs, for MKL's product with so many rows."""
    return pack_for_mkl(weight.contiguous(), rows)


def onednn_linear_weight(weight: Tensor, rows: int | None) -> Tensor:
    """The same for oneDNN's product; None: any number of rows."""
    return pack_for_onednn(weight.contiguous(), rows)


def onednn_convolution_weight(weight: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """`weight` for oneDNN's convolution: padding, stride, dilation, groups, size of the images."""
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    laid = weight.contiguous(memory_format=last) if weight.dim() > 3 else weight.contiguous()
    return _packed(PACKING[onednn_convolution_weight](laid, *shape))


def onednn_transposed_convolution_weight(weight: Tensor, *shape: int | Sequence[int]) -> Tensor:
    """The same for its transposed convolution: padding, that of the result, stride, …."""
    return _packed(PACKING[onednn_transposed_convolution_weight](weight.contiguous(), *shape))


def onednn_lstm_weight(weight: Tensor, recurrent: Tensor, which: int, *shape: Any) -> Tensor:
    """One of the weights of an LSTM's layer: that of its input (0) or of its state (1).

    `shape`: hidden size, whether it runs backward, has biases, size of its input; None: of any.
    """
    *known, size = shape
    return pack_lstm((weight.contiguous(), recurrent.contiguous()), *known, False, size)[which]


def int8_linear_weight(
    weight: Tensor, zero_points: Tensor | None, shape: Sequence[int] | None
) -> Tensor:
    """Integers for oneDNN's product with inputs of one size."""
    return _packed(PACKING[int8_linear_weight](weight, zero_points, shape))


def int8_convolution_weight(
    weight: Tensor, scales: Tensor, zero_points: Tensor | None, image: Sequence[Any], *shape: Any
) -> Tensor:
    """Integers for oneDNN's convolution; `image`: the scale and the zero point of the images."""
    return _packed(PACKING[int8_convolution_weight](weight, scales, zero_points, image, *shape))


Packing = tuple[Any, tuple[Any, ...]]


def _packed(packing: Packing) -> Tensor:
    pack, given = packing
    made: Tensor = pack(*given)
    return made


def _convolution(weight: Tensor, *shape: Any) -> Packing:
    return convolution_packer(), (weight, *shape)


def _transposed_convolution(weight: Tensor, *shape: Any) -> Packing:
    return transposed_convolution_packer(), (weight, *shape)


def _int8_linear(weight: Tensor, zero_points: Tensor | None, shape: Any) -> Packing:
    return int8_linear_packer(), (_centred(weight, zero_points), shape)


def _int8_convolution(
    weight: Tensor, scales: Tensor, zero_points: Tensor | None, image: Any, *shape: Any
) -> Packing:
    return int8_convolution_packer(), (_centred(weight, zero_points), scales, *image, *shape)


# What a function above calls in the end, and with what: for those that do it later, elsewhere.
PACKING: Final[Mapping[Any, Callable[..., Packing]]] = {
    onednn_convolution_weight: _convolution,
    onednn_transposed_convolution_weight: _transposed_convolution,
    int8_linear_weight: _int8_linear,
    int8_convolution_weight: _int8_convolution,
}


def channel_scales(scales: Tensor) -> Tensor:
    """Scales as oneDNN wants them."""
    return scales.to(torch.float32).contiguous()


def same_scale(weight: Tensor, scale: float) -> Tensor:
    """One scale for all of a weight."""
    return torch.full((1,), scale, dtype=torch.float32, device=weight.device)


def centres(scales: Tensor) -> Tensor:
    """The zero points of a weight, all of which are 0."""
    return torch.zeros(scales.numel(), dtype=torch.int64, device=scales.device)


def _centred(weight: Tensor, zero_points: Tensor | None) -> Tensor:
    """`weight`, which oneDNN takes to have no zero points."""
    if zero_points is not None and bool(zero_points.any()):
        raise RuntimeError(
            "a weight was quantised with zero points other than 0, which oneDNN would ignore: "
            'quantise weights symmetrically, or leave out int8 (Options.skip: "int8_linear", '
            '"int8_convolution")'
        )
    return weight.contiguous()


PACKS: Final = frozenset(
    {
        mkl_linear_weight,
        onednn_linear_weight,
        onednn_convolution_weight,
        onednn_transposed_convolution_weight,
        onednn_lstm_weight,
        int8_linear_weight,
        int8_convolution_weight,
        channel_scales,
        same_scale,
        centres,
    }
)
