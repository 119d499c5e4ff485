"""From Triton source to machine code for a card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from stator.codegen.triton.kernel import Written
from stator.codegen.triton.source import function_of

MOST_THREADS: Final = 16
ALIGNED: Final = [["tt.divisibility", 16]]  # bytes that addresses are multiples of


@dataclass(frozen=True, slots=True)
class Cubin:
    """A kernel's machine code, and what its launch needs."""

    code: bytes
    name: str
    shared: int  # bytes of shared memory
    warps: int
    hidden: int  # pointers that Triton's kernels take behind our arguments: scratch, unused
    ptx: str = ""


def compile_all(
    kernels: Sequence[Written], capability: int, *, aligned: bool = True
) -> list[Cubin]:
    """Machine code for cards of that capability (90: Hopper), compiled side by side.

    `aligned`: for buffers that begin where a thread's widest access may.
    """
    names = _names()  # here, once: threads would import it together
    make = partial(_compile, capability=capability, aligned=aligned, names=names)
    if len(kernels) < 2:
        return [make(kernel) for kernel in kernels]
    count = min(MOST_THREADS, os.cpu_count() or 1, len(kernels))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(make, kernels))


def _compile(
    written: Written, *, capability: int, aligned: bool, names: Mapping[str, Any]
) -> Cubin:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = triton.jit(function_of(written.name, written.source, names))
    pointers = [n for n, (_, kind) in enumerate(written.signature) if kind.startswith("*")]
    source = ASTSource(
        fn=function,
        signature=dict(written.signature),
        attrs={(number,): ALIGNED for number in pointers} if aligned else {},
    )
    options = {"num_warps": written.shape.warps, "num_stages": written.shape.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared, name = made.metadata.shared, made.metadata.name
    return Cubin(made.asm["cubin"], name, shared, written.shape.warps, 2, made.asm["ptx"])


@cache
def _names() -> dict[str, Any]:
    """What a kernel's source refers to; functions of device.py refer to each other."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from stator.codegen.triton import device

    own: dict[str, Any] = {"tl": tl}
    for function in device.FUNCTIONS:
        own[function.__name__] = triton.jit(_bound(function, own))
    return {**own, "libdevice": libdevice, "reduced": tl.reduce, "scanned": tl.associative_scan}


def _bound(function: Any, names: dict[str, Any]) -> Any:
    """The function with other globals: those that it calls are compiled ones there."""
    kind = type(function)
    made = kind(function.__code__, names, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__
    made.__module__ = function.__module__
    return made
