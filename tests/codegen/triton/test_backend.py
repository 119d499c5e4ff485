"""Kernels of a GPU: for which cards there are any."""

from __future__ import annotations

import pytest
import torch

from stator.codegen.triton.backend import capability_of
from stator.errors import Unsupported


def test_a_gpu_by_amd_has_none_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")

    with pytest.raises(Unsupported, match="no kernels are written for GPUs by AMD"):
        capability_of(torch.device("cuda", 0))
