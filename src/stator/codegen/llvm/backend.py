"""Kernels to callables, each distinct kernel compiled once in a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final

from stator.codegen.llvm import jit
from stator.core import faults
from stator.loops.access import nodes
from stator.loops.ir import Kernel

WORTH_A_MODULE: Final = 200  # nodes of expressions: about what takes longer than a thread to start


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel's machine code."""

    name: str  # in its module
    module: jit.Module

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.module.code.address(self.name))

    @property
    def function(self) -> Any:
        """For Python: addresses of buffers, sizes, threads; of a list: where, how long, threads."""
        return self.module.entries[self.name]


_compiled: Final[dict[Kernel, Entry]] = {}  # machine code lives as long as the process
_lock: Final = Lock()


def load_kernels(kernels: Sequence[Kernel]) -> list[Entry]:
    """The code of each kernel; those not seen before are compiled, side by side."""
    # With a fault, neither is found what was right nor kept what is wrong.
    known: dict[Kernel, Entry] = {} if faults.SET else _compiled
    with _lock:
        fresh = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
        for share, module in _load_side_by_side(_shares(fresh)):
            for kernel, own in zip(share, module.kernels, strict=True):
                known[kernel] = Entry(own.name, module)
        return [known[kernel] for kernel in kernels]


def _load_side_by_side(shares: list[list[Kernel]]) -> list[tuple[list[Kernel], jit.Module]]:
    # Named within a module: the same kernels give the same object file.
    named = [[replace(k, name=f"kernel_{i}") for i, k in enumerate(share)] for share in shares]
    if len(named) < 2:
        return list(zip(shares, map(jit.load, named), strict=True))
    with ThreadPoolExecutor(len(named)) as pool:
        return list(zip(shares, pool.map(jit.load, named), strict=True))


def _shares(kernels: list[Kernel]) -> list[list[Kernel]]:
    """Kernels in as many modules as there are processors, of about the same size."""
    sizes = {kernel: sum(len(nodes(s)) for s in kernel.statements) for kernel in kernels}
    count = min(processors(), 1 + sum(sizes.values()) // WORTH_A_MODULE)
    shares: list[list[Kernel]] = [[] for _ in range(count)]
    loads = [0] * count
    for kernel in sorted(kernels, key=lambda kernel: -sizes[kernel]):
        least = loads.index(min(loads))
        shares[least].append(kernel)
        loads[least] += sizes[kernel]
    return [share for share in shares if share]


def processors() -> int:
    """How many the process may use, where the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1
