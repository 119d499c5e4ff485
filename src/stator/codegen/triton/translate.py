"""From Triton source to machine code for a card, in whichever process.

Workers import this module alone, without the rest of the package: nothing here may import what is
not beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Final

from stator.codegen.triton.source import function_of

ALIGNED: Final = [["tt.divisibility", 16]]  # bytes that addresses are multiples of


@dataclass(frozen=True, slots=True)
class Request:
    """A kernel to compile."""

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]  # parameters and their types
    warps: int
    stages: int
    capability: int  # of the card; 90: Hopper
    aligned: bool  # whether buffers begin where a thread's widest access may


@dataclass(frozen=True, slots=True)
class Cubin:
    """A kernel's machine code, and what its launch needs."""

    code: bytes
    name: str
    shared: int  # bytes of shared memory
    warps: int
    hidden: int = 2  # pointers that Triton's kernels take behind our arguments: scratch, unused


def translate(request: Request) -> Cubin:
    """The machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = triton.jit(function_of(request.name, request.source, _names()))
    pointers = [n for n, (_, kind) in enumerate(request.signature) if kind.startswith("*")]
    source = ASTSource(
        fn=function,
        signature=dict(request.signature),
        attrs={(number,): ALIGNED for number in pointers} if request.aligned else {},
    )
    target = GPUTarget("cuda", request.capability, 32)
    options: dict[str, Any] = {"num_warps": request.warps, "num_stages": request.stages}
    options["enable_fp_fusion"] = True  # said: Triton's own default is about to change
    made = triton.compile(source, target=target, options=options)
    return Cubin(made.asm["cubin"], made.metadata.name, made.metadata.shared, request.warps)


@cache
def _names() -> Mapping[str, Any]:
    """What a kernel's source refers to; functions of device.py refer to each other."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from stator.codegen.triton import device

    own: dict[str, Any] = {"tl": tl}
    for function in device.FUNCTIONS:
        own[function.__name__] = triton.jit(_bound(function, own))
    named = {"reduced": tl.reduce, "scanned": tl.associative_scan, "dotted": tl.dot}
    return {**own, "libdevice": libdevice, **named}


def _bound(function: Any, names: dict[str, Any]) -> FunctionType:
    """The function with other globals: those that it calls are compiled ones there."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__
    made.__module__ = function.__module__
    return made
