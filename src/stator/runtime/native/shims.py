"""Operators that torch exports as C functions, and how their arguments are passed.

The signatures follow from the operators' schemas by rule; a test holds them against the headers
that torch installs.  A symbol never changes its signature: what needs another gets a new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from stator.ops.libraries import mkl_linear, onednn_convolution, onednn_linear

aten: Final = torch.ops.aten

# The result goes into memory that the plan has for it.
INTO_MEMORY: Final[Mapping[Any, str]] = {
    aten.mm.default: "aoti_torch_cpu_mm_out",
    aten.addmm.default: "aoti_torch_cpu_addmm_out",
    aten.bmm.default: "aoti_torch_cpu_bmm_out",
    aten.baddbmm.default: "aoti_torch_cpu_baddbmm_out",
}

# The results are tensors that torch makes.
FRESH: Final[Mapping[Any, str]] = {
    aten.convolution.default: "aoti_torch_cpu_convolution",
    aten.convolution_backward.default: "aoti_torch_cpu_convolution_backward",
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    aten.topk.default: "aoti_torch_cpu_topk",
    aten.sort.default: "aoti_torch_cpu_sort",
    aten._embedding_bag.default: "aoti_torch_cpu__embedding_bag",
    onednn_linear(): "aoti_torch_cpu__linear_pointwise",
    onednn_convolution(): "aoti_torch_cpu_mkldnn__convolution_pointwise",
    mkl_linear(): "aoti_torch_cpu__mkl_linear",
}

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
    "Optional[bool]": ("ptr",),
    "Optional[str]": ("ptr",),  # to a string
    "List[int]": ("ptr", "i64"),
    "List[bool]": ("ptr", "i64"),  # of i32
    "Optional[List[int]]": ("ptr", "i64"),  # to a list
    "List[Optional[number]]": ("ptr", "i64"),  # of which we pass the empty one alone
}
