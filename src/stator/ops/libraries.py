"""Products and convolutions of the libraries that torch was built with: oneDNN and MKL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stator.torch_api import operator_named


def onednn_linear() -> Any:
    """oneDNN's x @ w.t() + b; None where torch was built or is run without it."""
    return _onednn("_linear_pointwise")


def onednn_convolution() -> Any:
    """oneDNN's convolution with an activation behind it; None as above."""
    return _onednn("_convolution_pointwise")


def onednn_convolution_plus() -> Any:
    """The same, with a tensor that is added."""
    return _onednn("_convolution_pointwise.binary")


def onednn_convolution_onto() -> Any:
    """The same, which stores into the tensor that it adds."""
    return _onednn("_convolution_pointwise_.binary")


def onednn_transposed_convolution() -> Any:
    """The same of a transposed one; None as above."""
    return _onednn("_convolution_transpose_pointwise")


def mkl_linear() -> Any:
    """MKL's x @ w.t() + b on a packed weight; None where torch was built without it."""
    if not torch.backends.mkl.is_available() or onednn_linear() is None:
        return None  # torch packs for MKL in tensors of oneDNN's
    return _operator("mkl::_mkl_linear")


def pack_for_mkl(weight: Tensor, rows: int) -> Tensor:
    """A weight for `mkl_linear`."""
    packed: Tensor = operator_named("mkl::_mkl_reorder_linear_weight")(weight, rows)
    return packed


def pack_for_onednn(weight: Tensor, rows: int | None) -> Tensor:
    """A weight for `onednn_linear`."""
    packed: Tensor = operator_named("mkldnn::_reorder_linear_weight")(weight, rows)
    return packed


def convolution_packer() -> Any:
    """Packs a weight for `onednn_convolution`: and padding, stride, …, the size of the image."""
    return operator_named("mkldnn::_reorder_convolution_weight")


def transposed_convolution_packer() -> Any:
    """The same for `onednn_transposed_convolution`; padding of the result behind that of images."""
    return operator_named("mkldnn::_reorder_convolution_transpose_weight")


def pack_lstm(weights: tuple[Tensor, Tensor], *shape: Any) -> Sequence[Tensor]:
    """Weights for a layer of an LSTM, of its input and of its state.

    Hidden size, whether it runs backward, has biases, has batches first, size of the input or None.
    """
    packed: Sequence[Tensor] = operator_named("mkldnn::_reorder_mkldnn_rnn_layer_weight")(
        *weights, *shape
    )
    return packed


def _onednn(name: str) -> Any:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    return _operator(f"mkldnn::{name}")


def _operator(name: str) -> Any:
    try:
        return operator_named(name)
    except AttributeError:
        return None


def int8_linear() -> Any:
    """oneDNN's product of integers, with what stands behind it; None as above."""
    return _onednn_int8("qlinear_pointwise")


def int8_linear_onto() -> Any:
    """The same as `int8_linear`, which adds to a tensor of integers where that lies."""
    return _onednn_int8("qlinear_pointwise.binary")


def int8_linear_of_tensors() -> Any:
    """The same, where the scale of the input is known at run time alone."""
    return _onednn_int8("qlinear_pointwise.tensor")


def int8_convolution() -> Any:
    """oneDNN's convolution of integers, with an activation behind it; None as above."""
    return _onednn_int8("qconv_pointwise")


def int8_convolution_of_tensors() -> Any:
    """The same, where the scale of the image is known at run time alone."""
    return _onednn_int8("qconv_pointwise.tensor")


def int8_convolution_onto() -> Any:
    """The same as `int8_convolution`, which adds to a tensor of integers where that lies.

    What it returns is a copy of that.
    """
    return _onednn_int8("qconv2d_pointwise.binary")


def int8_linear_packer() -> Any:
    """Packs a weight for `int8_linear`: and the shape of the input, if it is known."""
    return operator_named("onednn::qlinear_prepack")


def int8_convolution_packer() -> Any:
    """Packs a weight for `int8_convolution`.

    Its scales; scale and zero point of the image, stride, padding, dilation, groups, size of the
    image.
    """
    return operator_named("onednn::qconv_prepack")


def _onednn_int8(name: str) -> Any:
    return None if onednn_linear() is None else _operator(f"onednn::{name}")
