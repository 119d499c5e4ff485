"""Statistics of norms have the types that eager gives them, which fake tensors do not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import check

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [False, True])
def test_halves_with_parameters(dtype: torch.dtype, kernels: bool) -> None:
    """Wide parameters make wide statistics."""

    def norms(x: Tensor, w: Tensor) -> Any:
        return (
            *torch.native_layer_norm(x, [6], w, w, 1e-5),
            *torch.native_group_norm(x, w, w, 5, 6, 6, 2, 1e-5),
            *aten._native_batch_norm_legit.no_stats(x, w, None, True, 0.1, 1e-5),
            *aten._native_batch_norm_legit_functional(x, None, None, w, w, True, 0.1, 1e-5),
        )

    x, w = torch.randn(5, 6, 6).bfloat16(), torch.rand(6).to(dtype)
    check(norms, x, w, options={"kernels": kernels})


def test_sizes_that_vary() -> None:
    """A group norm is given sizes one by one: these are nodes too, of no type."""
    x, w = torch.randn(5, 6, 6, requires_grad=True), torch.rand(6, requires_grad=True)
    check(lambda x, w: torch.nn.functional.group_norm(x, 2, w, w), x, w, dynamic=True)


def test_evaluation_saves_no_statistics() -> None:
    """The running ones are all that the backward needs."""
    module = torch.nn.BatchNorm1d(6).eval()
    check(module, torch.randn(4, 6, requires_grad=True), options={"kernels": False})
    check(module, torch.randn(4, 6, requires_grad=True), options={"kernels": True})
