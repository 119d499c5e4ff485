"""Kernels to callables, each distinct kernel compiled once in a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any, Final

from stator.codegen.llvm import jit
from stator.loops.access import nodes
from stator.loops.ir import Kernel

WORTH_A_MODULE: Final = 200  # nodes of expressions: about what takes longer than a thread to start

_compiled: Final[dict[Kernel, Any]] = {}
_modules: Final[list[jit.Module]] = []  # machine code lives as long as the process
_lock: Final = Lock()


def load_kernels(kernels: Sequence[Kernel]) -> list[Any]:
    """A ctypes function for each kernel; those not seen before are compiled, side by side."""
    with _lock:
        fresh = [kernel for kernel in dict.fromkeys(kernels) if kernel not in _compiled]
        first = len(_compiled)
        named = {
            replace(kernel, name=f"kernel_{first + i}"): kernel for i, kernel in enumerate(fresh)
        }
        for module in _load_side_by_side(_shares(list(named))):
            _modules.append(module)
            for own in module.kernels:
                _compiled[named[own]] = module.entries[own.name]
        return [_compiled[kernel] for kernel in kernels]


def _load_side_by_side(shares: list[list[Kernel]]) -> list[jit.Module]:
    if len(shares) < 2:
        return [jit.load(share) for share in shares]
    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(jit.load, shares))


def _shares(kernels: list[Kernel]) -> list[list[Kernel]]:
    """Kernels in as many modules as there are processors, of about the same size."""
    sizes = {kernel: sum(len(nodes(s)) for s in kernel.statements) for kernel in kernels}
    count = min(_processors(), 1 + sum(sizes.values()) // WORTH_A_MODULE)
    shares: list[list[Kernel]] = [[] for _ in range(count)]
    loads = [0] * count
    for kernel in sorted(kernels, key=lambda kernel: -sizes[kernel]):
        least = loads.index(min(loads))
        shares[least].append(kernel)
        loads[least] += sizes[kernel]
    return [share for share in shares if share]


def _processors() -> int:
    """How many the process may use, where the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1
