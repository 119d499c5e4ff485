"""Libraries in memory: what loading them takes of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import stator


def open_files() -> int:
    """How many descriptors the process has."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("linker", [True, False])
def test_what_is_loaded_keeps_no_file_open(tmp_path: Path, *, linker: bool) -> None:
    x = torch.randn(3, 4)
    layers = [torch.nn.Linear(4, size) for size in range(2, 6)]
    paths = [
        stator.aot_compile(
            layer, (x,), options={"output_path": tmp_path / f"{n}.pt2", "linker": linker}
        )
        for n, layer in enumerate(layers)
    ]
    stator.load(paths[0])
    before = open_files()
    loaded = [stator.load(path) for path in paths]
    assert open_files() == before
    for layer, model in zip(layers, loaded, strict=True):
        torch.testing.assert_close(model(x), layer(x).detach())
