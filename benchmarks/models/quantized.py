"""Models in int8: quantised by PyTorch's PT2E road with torchao's quantizer for x86."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.models.built import Built


def is_installed() -> bool:
    """Whether models can be quantised here."""
    return find_spec("torchao") is not None


def in_int8(build: Callable[[Any, bool], Built]) -> Callable[[Any, bool], Built]:
    """A builder of the same model, quantised with its own inputs."""
    return partial(_built, build)


def _built(build: Callable[[Any, bool], Built], sizes: Any, train: bool) -> Built:
    module, inputs = build(sizes, train)
    return Built(quantized(module.eval(), inputs), inputs)


def quantized(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The module with integers inside: static scales, a scale for each channel of a weight."""
    pt2e: Any = import_module("torchao.quantization.pt2e")
    roads: Any = import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86: Any = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, inputs).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = roads.prepare_pt2e(exported, quantizer)
        prepared(*inputs)  # sees how large values are
        converted: nn.Module = roads.convert_pt2e(prepared)
        pt2e.move_exported_model_to_eval(converted)
    converted.eval = lambda: converted  # an exported one refuses
    return converted
