"""Kernels to callables, each distinct kernel compiled once in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from stator.codegen.llvm import jit
from stator.loops.ir import Kernel

_compiled: Final[dict[Kernel, Any]] = {}
_modules: Final[list[jit.Module]] = []  # machine code lives as long as the process


def load_kernels(kernels: Sequence[Kernel]) -> list[Any]:
    """A ctypes function for each kernel; those not seen before are compiled, in one module."""
    fresh = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _compiled]
    if fresh:
        first = len(_compiled)
        named = [replace(kernel, name=f"kernel_{first + i}") for i, kernel in enumerate(fresh)]
        module = jit.load(named)
        _modules.append(module)
        for kernel, own in zip(fresh, named, strict=True):
            _compiled[kernel] = module.entries[own.name]
    return [_compiled[kernel] for kernel in kernels]
