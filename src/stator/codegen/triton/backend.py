"""Kernels of a GPU to callables, each distinct kernel compiled once for a device in a process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

Place: TypeAlias = tuple[torch.device, bool]  # where it runs, and whether its buffers are aligned

_loaded: Final[dict[tuple[Kernel, Place], GpuEntry]] = {}  # as long as the process
_lock: Final = Lock()


def load_gpu_kernels(
    kernels: Sequence[Kernel], device: torch.device, anywhere: Collection[Kernel] = ()
) -> list[GpuEntry]:
    """The code of each kernel; those not seen before are compiled, side by side.

    Buffers of kernels in `anywhere` may begin where a thread's widest access may not.
    """
    known = {} if faults.SET else _loaded
    wanted = [(kernel, (device, kernel not in anywhere)) for kernel in kernels]
    with _lock:
        fresh = [one for one in dict.fromkeys(wanted) if one not in known]
        for place in dict.fromkeys(place for _, place in fresh):
            own = [kernel for kernel, other in fresh if other == place]
            made: Iterable[GpuEntry] = map(_interpreted, own)
            if device.type == "cuda":
                made = _compiled(own, place)
            known |= {(k, place): entry for k, entry in zip(own, made, strict=True)}
        return [known[one] for one in wanted]


def _interpreted(kernel: Kernel) -> Interpreted:
    return Interpreted(interpreted(kernel))


def _compiled(kernels: Sequence[Kernel], place: Place) -> list[Entry]:
    device, aligned = place
    major, minor = torch.cuda.get_device_capability(device)
    named = {kernel: f"kernel_{number}" for number, kernel in enumerate(kernels)}
    launchers = _launchers(named, 10 * major + minor, device.index or 0, aligned=aligned)
    module: Any = load(launchers)
    return [Entry(launcher.name, module) for launcher in launchers]


def launchers_of(
    names: Mapping[Kernel, str], capability: int, anywhere: Collection[Kernel]
) -> list[Launcher]:
    """Launchers of kernels, under their names, for cards of a capability, whichever it is.

    `anywhere` is what it is for `load_gpu_kernels`.
    """
    found: list[Launcher] = []
    for aligned in (True, False):
        own = [kernel for kernel in names if aligned is (kernel not in anywhere)]
        found += _launchers({k: names[k] for k in own}, capability, None, aligned=aligned)
    return found


def _launchers(
    names: Mapping[Kernel, str], capability: int, device: int | None, *, aligned: bool
) -> list[Launcher]:
    written = [write_kernel(kernel, shape_of(kernel)) for kernel in names]
    cubins = compile_all(written, capability, aligned=aligned)
    return [
        _launcher(replace(kernel, name=names[kernel]), source, cubin, device)
        for kernel, source, cubin in zip(names, written, cubins, strict=True)
    ]


def _launcher(kernel: Kernel, written: Written, cubin: Cubin, device: int | None) -> Launcher:
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
