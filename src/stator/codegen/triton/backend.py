"""Kernels of a GPU to callables, each distinct kernel compiled once for a device in a process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, TypeAlias

import torch

from stator.codegen.llvm.backend import Entry
from stator.codegen.llvm.shape import symbols_of
from stator.codegen.triton.compile import begin_all, compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.codegen.triton.kernel import Written, write_kernel
from stator.codegen.triton.launch import Launcher, load
from stator.codegen.triton.shape import WARP, Shape, shape_of
from stator.codegen.triton.translate import Cubin
from stator.core import faults
from stator.errors import Unsupported
from stator.loops.index import Index
from stator.loops.ir import Kernel


@dataclass(frozen=True, slots=True)
class Interpreted:
    """A kernel that Triton's interpreter runs: it has no machine code."""

    function: Callable[..., None]
    shape: Shape


@dataclass(frozen=True, slots=True)
class GpuCode(Entry):
    """A kernel's launcher, with the machine code in it."""

    shape: Shape


GpuEntry: TypeAlias = GpuCode | Interpreted
Shaped: TypeAlias = tuple[Kernel, Shape]
Place: TypeAlias = tuple[torch.device, bool]  # where it runs, and whether its buffers are aligned

_loaded: Final[dict[tuple[Shaped, Place], GpuEntry]] = {}  # as long as the process
_lock: Final = Lock()


def load_gpu_kernels(
    kernels: Sequence[Kernel],
    device: torch.device,
    anywhere: Collection[Kernel] = (),
    shapes: Mapping[Kernel, Shape] | None = None,
) -> list[GpuEntry]:
    """The code of each kernel; those not seen before are compiled, side by side.

    Buffers of kernels in `anywhere` may begin where a thread's widest access may not.  `shapes` are
    those of kernels that have others than the model's.
    """
    return begin_gpu_kernels(kernels, device, anywhere, shapes)()


def begin_gpu_kernels(
    kernels: Sequence[Kernel],
    device: torch.device,
    anywhere: Collection[Kernel] = (),
    shapes: Mapping[Kernel, Shape] | None = None,
) -> Callable[[], list[GpuEntry]]:
    """The same, begun: what is returned waits for it.

    Whoever wants the same meanwhile compiles it, too.
    """
    known = {} if faults.SET else _loaded
    chosen = shapes or {}
    wanted = [
        ((kernel, chosen.get(kernel) or shape_of(kernel)), (device, kernel not in anywhere))
        for kernel in kernels
    ]
    begin = _compiled if device.type == "cuda" else _interpreted
    with _lock:
        fresh = [one for one in dict.fromkeys(wanted) if one not in known]
        begun = [
            begin([shaped for shaped, other in fresh if other == place], place)
            for place in dict.fromkeys(place for _, place in fresh)
        ]

    def collect() -> list[GpuEntry]:
        made = [finish() for finish in begun]
        with _lock:
            for found in made:
                known.update(found)
            return [known[one] for one in wanted]

    return collect


Begun: TypeAlias = Callable[[], dict[tuple[Shaped, Place], GpuEntry]]


def _interpreted(kernels: Sequence[Shaped], place: Place) -> Begun:
    def finish() -> dict[tuple[Shaped, Place], GpuEntry]:
        return {
            ((kernel, shape), place): Interpreted(interpreted(kernel, shape), shape)
            for kernel, shape in kernels
        }

    return finish


def _compiled(kernels: Sequence[Shaped], place: Place) -> Begun:
    device, aligned = place
    written = [write_kernel(kernel, shape) for kernel, shape in kernels]
    cubins = begin_all(written, capability_of(device), aligned=aligned)

    def finish() -> dict[tuple[Shaped, Place], GpuEntry]:
        made = [
            (kernel, source, cubin)
            for (kernel, _), source, cubin in zip(kernels, written, cubins(), strict=True)
        ]
        entries = launchable(made, device)
        return {
            (shaped, place): GpuCode(entry.name, entry.module, shaped[1])
            for entry, shaped in zip(entries, kernels, strict=True)
        }

    return finish


def capability_of(device: torch.device) -> int:
    """Of the card; 90: Hopper."""
    if torch.version.hip is not None:  # torch calls these cards cuda as well
        raise Unsupported(
            "kernels",
            "no kernels are written for GPUs by AMD",
            hint="torch runs every operator there; Options(kernels=False) says that this is meant",
        )
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


def launchable(
    kernels: Sequence[tuple[Kernel, Written, Cubin]], device: torch.device
) -> list[Entry]:
    """Launchers of compiled kernels, in one module."""
    launchers = [
        _launcher(replace(kernel, name=f"kernel_{number}"), source, cubin, device.index or 0)
        for number, (kernel, source, cubin) in enumerate(kernels)
    ]
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
        written = [write_kernel(kernel, shape_of(kernel)) for kernel in own]
        cubins = compile_all(written, capability, aligned=aligned)
        found += [
            _launcher(replace(kernel, name=names[kernel]), source, cubin, None)
            for kernel, source, cubin in zip(own, written, cubins, strict=True)
        ]
    return found


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
