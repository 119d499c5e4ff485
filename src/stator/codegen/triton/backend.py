"""Kernels of a GPU to callables, each distinct kernel compiled once for a device in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, TypeAlias

import torch

from stator.codegen.llvm.backend import Entry
from stator.codegen.llvm.shape import symbols_of
from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.codegen.triton.kernel import Written, write_kernel
from stator.codegen.triton.launch import Launcher, load
from stator.codegen.triton.shape import WARP, shape_of
from stator.codegen.triton.translate import Cubin
from stator.core import faults
from stator.loops.index import Index
from stator.loops.ir import Kernel


@dataclass(frozen=True, slots=True)
class Interpreted:
    """A kernel that Triton's interpreter runs: it has no machine code."""

    function: Callable[..., None]


GpuEntry: TypeAlias = Entry | Interpreted

_loaded: Final[dict[tuple[Kernel, torch.device], GpuEntry]] = {}  # as long as the process
_lock: Final = Lock()


def load_gpu_kernels(kernels: Sequence[Kernel], device: torch.device) -> list[GpuEntry]:
    """The code of each kernel; those not seen before are compiled, side by side."""
    known = {} if faults.SET else _loaded
    with _lock:
        fresh = [kernel for kernel in dict.fromkeys(kernels) if (kernel, device) not in known]
        made: Iterable[GpuEntry] = map(_interpreted, fresh)
        if device.type == "cuda":
            made = _compiled(fresh, device)
        for kernel, entry in zip(fresh, made, strict=True):
            known[kernel, device] = entry
        return [known[kernel, device] for kernel in kernels]


def _interpreted(kernel: Kernel) -> Interpreted:
    return Interpreted(interpreted(kernel))


def _compiled(kernels: Sequence[Kernel], device: torch.device) -> list[Entry]:
    if not kernels:
        return []
    major, minor = torch.cuda.get_device_capability(device)
    written = [write_kernel(kernel, shape_of(kernel)) for kernel in kernels]
    cubins = compile_all(written, 10 * major + minor)
    launchers = [
        _launcher(replace(kernel, name=f"kernel_{number}"), source, cubin, device.index or 0)
        for number, (kernel, source, cubin) in enumerate(zip(kernels, written, cubins, strict=True))
    ]
    module: Any = load(launchers)
    return [Entry(launcher.name, module) for launcher in launchers]


def _launcher(kernel: Kernel, written: Written, cubin: Cubin, device: int) -> Launcher:
    return Launcher(
        kernel.name,
        cubin.name,
        cubin.code,
        tuple("ptr" if kind.startswith("*") else kind for _, kind in written.signature),
        symbols_of(kernel),
        (written.grid, Index.of(1), Index.of(1)),
        WARP * cubin.warps,
        cubin.shared,
        device,
        cubin.hidden,
    )
