"""Runtimes that take a whole model compute what it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.others import PACKAGES, converted, installed


@pytest.mark.parametrize("name", PACKAGES)
def test_a_converted_model_computes_the_same(name: str) -> None:
    if name not in installed():
        pytest.skip("it is not installed")
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(converted(name, module)(x), module(x), rtol=1e-4, atol=1e-4)


def test_what_is_no_module_runs_as_it_is() -> None:
    assert converted("openvino", lambda x: x + 1)(torch.zeros(1)) == 1
