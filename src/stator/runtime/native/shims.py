"""Operators that torch exports as C functions, and how their arguments are passed.

`aoti_torch_cpu_mm_out` is mm_out on the CPU: a name here, a device and what it was built with tell
whether torch has it.
The signatures follow from the operators' schemas by rule; a test holds them against the headers
that torch installs.  A symbol never changes its signature: what needs another gets a new name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from stator.ops.libraries import (
    mkl_linear,
    onednn_convolution,
    onednn_linear,
    onednn_transposed_convolution,
)
from stator.torch_api import torch_symbol

aten: Final = torch.ops.aten

# The result goes into memory that the plan has for it.
INTO_MEMORY: Final[Mapping[Any, str]] = {
    aten.mm.default: "mm_out",
    aten.addmm.default: "addmm_out",
    aten.bmm.default: "bmm_out",
    aten.baddbmm.default: "baddbmm_out",
}

_ATTENTION: Final = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)

# The results are tensors that torch makes, and numbers.
FRESH: Final[Mapping[Any, str]] = {
    aten.convolution.default: "convolution",
    aten.convolution_backward.default: "convolution_backward",
    **{op: op.name().removeprefix("aten::") for op in _ATTENTION},
    aten.topk.default: "topk",
    aten.sort.default: "sort",
    aten._embedding_bag.default: "_embedding_bag",
    onednn_linear(): "_linear_pointwise",
    onednn_convolution(): "mkldnn__convolution_pointwise",
    onednn_transposed_convolution(): "mkldnn__convolution_transpose_pointwise",
    mkl_linear(): "_mkl_linear",
    aten.mkldnn_rnn_layer.default: "mkldnn_rnn_layer",
}

# As above.  Numbers go as doubles, which operators on integers do not take.
WITH_NUMBERS: Final[Mapping[Any, str]] = {
    aten.add.Tensor: "add_Tensor",
    aten.addbmm.default: "addbmm",
    aten.addmv.default: "addmv",
    aten.histc.default: "histc",
    aten.segment_reduce.default: "segment_reduce",
    aten._addmm_activation.default: "_addmm_activation",
}


def symbol_of(name: str | None, device: torch.device) -> str | None:
    """What torch calls a function on a device, if it has it there."""
    symbol = f"aoti_torch_{device.type}_{name}"
    if name is None or (torch_symbol(symbol) is None and symbol not in _elsewhere(device.type)):
        return None
    return symbol


@cache
def _elsewhere(kind: str) -> frozenset[str]:
    """What torch exports where it was built for a kind of device, and here it was not.

    Nothing here runs on such a device then, but a package may be built for it.
    """
    if kind != "cuda" or torch.version.cuda is not None or not _CUDA_HEADER.exists():
        return frozenset()
    return frozenset(re.findall(r"\baoti_torch_cuda_\w+(?=\()", _CUDA_HEADER.read_text()))


_CUDA_HEADER: Final = (
    Path(torch.__file__)
    .with_name("include")
    .joinpath("torch", "csrc", "inductor", "aoti_torch", "generated", "c_shim_cuda.h")
)


# A type of a schema, and the types that it has in C.
PASSED_AS: Final[Mapping[str, tuple[str, ...]]] = {
    "Tensor": ("ptr",),
    "Optional[Tensor]": ("ptr",),  # to a handle
    "int": ("i64",),
    "float": ("double",),
    "number": ("double",),
    "bool": ("i32",),
    "str": ("ptr",),
    "Optional[int]": ("ptr",),
    "Optional[float]": ("ptr",),
    "Optional[number]": ("ptr",),
    "Optional[bool]": ("ptr",),
    "Optional[str]": ("ptr",),  # to a string
    "List[int]": ("ptr", "i64"),
    "List[bool]": ("ptr", "i64"),  # of i32
    "Optional[List[int]]": ("ptr", "i64"),  # to a list
    "List[Optional[number]]": ("ptr", "i64"),  # of which we pass the empty one alone
}
