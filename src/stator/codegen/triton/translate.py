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


# A kernel for nobody, with something of all that others are made of.
FIRST: Final = Request(
    "first",
    """def first(a0, a1):
    x = tl.arange(0, 128)
    v = libdevice.exp(tl.load(a1 + x, mask=x < 100))
    tl.store(a0 + x, v / reduced(v, 0, add), mask=x < 100)
""",
    (("a0", "*fp32"), ("a1", "*fp32")),
    warps=4,
    stages=1,
    capability=80,
    aligned=True,
)


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
    code, found = _through_stages(source, target, options)
    return Cubin(code, found["name"], found["shared"], request.warps)


def _through_stages(source: Any, target: Any, options: dict[str, Any]) -> tuple[bytes, Any]:
    """Machine code, by the stages of Triton's compiler alone, and what these found out.

    `triton.compile` would ask its own cache first: the key is made of every byte of Triton, which
    takes half a second in each process, and what we compile has a cache already.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    chosen = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators = backend.get_codegen_implementation(chosen)
    module = source.make_ir(target, chosen, generators, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, chosen, source.language)
    found: dict[str, Any] = {"target": target, **vars(chosen)}
    for stage in stages.values():
        module = stage(module, found)
    return module, found


@cache
def _names() -> Mapping[str, Any]:
    """What a kernel's source refers to; functions of device.py refer to each other.

    Those of hardware.py come last: they take the place of others.
    """
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    from stator.codegen.triton import device, hardware

    own: dict[str, Any] = {"tl": tl}
    for function in (*device.FUNCTIONS, *hardware.FUNCTIONS):
        own[function.__name__] = triton.jit(_bound(function, own))
    named = {"reduced": tl.reduce, "scanned": tl.associative_scan, "dotted": tl.dot}
    return {**own, "libdevice": libdevice, **named}


def _bound(function: Any, names: dict[str, Any]) -> FunctionType:
    """The function with other globals: those that it calls are compiled ones there."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__
    made.__module__ = function.__module__
    return made
