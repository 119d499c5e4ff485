"""Functions of libraries that machine code calls, by name: OpenMP's, torch's, Python's, C's."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from stator.torch_api import torch_symbol

# Threads come from the OpenMP library that torch itself uses, so that kernels and eager operators
# share one pool.
OPENMP: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def library_function(name: str) -> int:
    """Where a function is."""
    if name not in OPENMP:
        found = torch_symbol(name)
        if found is not None:
            return found
    libraries = (_openmp(),) if name in OPENMP else (ctypes.pythonapi, _process())
    for library in libraries:
        try:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
        assert address is not None, f"{name} has an address"
        return address
    raise LookupError(f"machine code calls {name}, which no library here has")


@cache
def _openmp() -> Any:
    folder = Path(torch.__file__).parent / "lib"
    for path in (*sorted(folder.glob("libgomp*")), "libgomp.so.1"):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise OSError("torch's OpenMP library (libgomp) was not found")


@cache
def _process() -> Any:
    return ctypes.CDLL(None)
