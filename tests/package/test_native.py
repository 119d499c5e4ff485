"""Libraries in memory: what loading them takes of the process."""

from __future__ import annotations

import ctypes
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


def next_key() -> int:
    """Which of the process's keys of threads (there are 1024) is the next that is free."""
    key, process = ctypes.c_uint(), ctypes.CDLL(None)
    assert process.pthread_key_create(ctypes.byref(key), None) == 0
    process.pthread_key_delete(key)
    return key.value


def test_calls_that_succeed_take_no_key_of_the_process(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    path = stator.aot_compile(
        torch.nn.Softsign(), (x,), options={"output_path": tmp_path / "model.pt2"}
    )
    before = next_key()
    loaded = stator.load(path)
    loaded(x)
    assert next_key() == before
    with pytest.raises(
        ValueError, match=r"input 0, .*: type float64, and it was built for float32"
    ):
        loaded(x.double())


def test_errors_are_told_when_the_process_has_no_keys_left(tmp_path: Path) -> None:
    x, process, keys = torch.randn(3, 4), ctypes.CDLL(None), []
    path = stator.aot_compile(
        torch.nn.Tanhshrink(), (x,), options={"output_path": tmp_path / "model.pt2"}
    )
    loaded = stator.load(path)
    key = ctypes.c_uint()
    while process.pthread_key_create(ctypes.byref(key), None) == 0:
        keys.append(key.value)
    try:
        with pytest.raises(ValueError, match="type float64"):
            loaded(x.double())
    finally:
        for number in keys:
            process.pthread_key_delete(number)
