"""From LLVM text to machine code in this process.

LLVM is imported here alone, when the first kernel is built.  Threads come from the OpenMP library
that torch itself uses, so that kernels and eager operators share one pool.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from stator.codegen.llvm import math
from stator.codegen.llvm.entry import emit_kernel
from stator.codegen.llvm.libraries import OPENMP, library_function
from stator.codegen.llvm.objects import can_load, load_object
from stator.codegen.llvm.shape import arguments_of, needed_math, symbols_of
from stator.codegen.llvm.share import share_rows
from stator.codegen.llvm.writer import numbered
from stator.core import faults
from stator.loops.ir import Kernel

_ATTRIBUTES: Final = (
    'attributes #0 = { nounwind "prefer-vector-width"="512" "no-trapping-math"="true" }'
)

# Functions of libraries are called through a table: code that finds its constants nearby would not
# reach them, and llvmlite's memory manager foresees a table, not the jumps that are the other way.
_THROUGH_A_TABLE: Final = """!llvm.module.flags = !{!1000000}
!1000000 = !{i32 7, !"RtLibUseGOT", i32 1}"""

KEPT_TEXTS: Final = 64  # graphs that are alike call their kernels alike
# Machines that nobody uses, at most as many as threads ever compiled at once.
_idle: Final[defaultdict[tuple[int, str | None], list[Any]]] = defaultdict(list)

_INTRINSICS: Final = {  # name: number of arguments
    "fabs": 1,
    "minimum": 2,
    "maximum": 2,
    "sqrt": 1,
    "floor": 1,
    "ceil": 1,
    "trunc": 1,
    "roundeven": 1,
    "copysign": 2,
    "fma": 3,
}


@dataclass(frozen=True, slots=True)
class Module:
    """Machine code of some kernels; lives as long as this object."""

    kernels: tuple[Kernel, ...]
    code: Any
    entries: dict[str, Any]  # kernel's name -> ctypes function
    data: bytes  # the object file, where it was made


def module_text(kernels: Iterable[Kernel], registers: int = 1, *, shares: bool = False) -> str:
    """LLVM text of a module with all `kernels`, whose vectors take so many registers each.

    `shares`: whether loops that differ in a few numbers are there once.
    """
    kernels = list(kernels)
    needed = (
        set().union(*(needed_math(kernel.statements) for kernel in kernels)) if kernels else set()
    )
    declared = math.definitions(sorted(needed, key=lambda pair: (pair[0].name, pair[1].value)))
    lines = [
        declared,
        "declare void @GOMP_parallel(ptr, ptr, i32, i32) nonlazybind",
        "declare i32 @omp_get_thread_num() nonlazybind",
        "declare i32 @omp_get_num_threads() nonlazybind",
        "declare noalias ptr @malloc(i64) nonlazybind",
        "declare void @free(ptr) nonlazybind",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    for name, count in _INTRINSICS.items():
        for kind, suffix in (("float", "f32"), ("double", "f64")):
            line = f"declare {kind} @llvm.{name}.{suffix}({', '.join([kind] * count)})"
            if f"@llvm.{name}.{suffix}(" not in declared:
                lines.append(line)
    texts = list(map(_kernel_text, kernels))
    own = share_rows(texts) if shares else texts
    text = "\n".join([*lines, *own, _ATTRIBUTES, _THROUGH_A_TABLE])
    return numbered(text, registers)


def _kernel_text(kernel: Kernel) -> str:
    text = emit_kernel(kernel)
    return str(faults.strike("kernel", text, kernel)) if faults.SET else text


def compile_kernels(kernels: Iterable[Kernel], processor: str, registers: int = 1) -> bytes:
    """An object file of `kernels` for some processor, by LLVM's name of it.

    `registers`: how many of them hold 512 bits.
    """
    parsed = _parsed(module_text(kernels, registers, shares=True))
    with _machine(processor=processor) as machine:
        _optimize(parsed, machine)
        return _object(parsed, machine)


def load(kernels: Iterable[Kernel]) -> Module:
    """Compile `kernels` and make them callable."""
    kernels = list(kernels)
    parsed = _parsed(module_text(kernels))
    with _machine() as machine:
        _optimize(parsed, machine)
        data = _object(parsed, machine) if can_load() else b""
    code = load_object(data, library_function) if can_load() else _Engine(parsed)
    entries = {k.name: _signature(k)(code.address(k.name)) for k in kernels}
    return Module(tuple(kernels), code, entries, data)


@lru_cache(KEPT_TEXTS)
def compile_text(text: str, processor: str | None = None) -> bytes:
    """An object file of LLVM text that is called seldom: made quickly, not to be quick."""
    parsed = _parsed("\n".join((text, _THROUGH_A_TABLE)))
    with _machine(opt=0, processor=processor) as machine:
        return _object(parsed, machine)


def _parsed(text: str) -> Any:
    llvm = _llvm()
    # A context of its own, so that other threads may compile other modules meanwhile.
    parsed = llvm.parse_assembly(text, llvm.create_context())
    parsed.verify()
    return parsed


def _object(parsed: Any, machine: Any) -> bytes:
    """The object file of a module."""
    library = _llvm().ffi.lib
    with _llvm().ffi.OutputString() as error:
        buffer = _unlocked("LLVMPY_TargetMachineEmitToMemory")(machine, parsed, 1, error)
        if not buffer:
            raise RuntimeError(str(error))
    try:
        start, size = library.LLVMPY_GetBufferStart(buffer), library.LLVMPY_GetBufferSize(buffer)
        return ctypes.string_at(start, size)
    finally:
        library.LLVMPY_DisposeMemoryBuffer(buffer)


class _Engine:
    """Machine code in memory by LLVM's own loader; lives as long as this object."""

    def __init__(self, parsed: Any) -> None:
        llvm = _llvm()
        for name in OPENMP:
            llvm.add_symbol(name, library_function(name))
        # The engine owns the machine then.  llvmlite's own memory manager keeps code and constants
        # together, as small code needs them.
        self.engine = llvm.create_mcjit_compiler(parsed, _new_target_machine(), use_lmm=True)
        _unlocked("LLVMPY_FinalizeObject")(self.engine)

    def address(self, name: str) -> int:
        """Where a function begins."""
        return int(self.engine.get_function_address(name))


def _signature(kernel: Kernel) -> Any:
    """What ctypes must know: addresses of buffers, sizes, threads; of a list: where, how long."""
    if kernel.is_list:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
    buffers = [ctypes.c_void_p] * len(arguments_of(kernel))
    sizes = [ctypes.c_int64] * len(symbols_of(kernel))
    return ctypes.CFUNCTYPE(None, *buffers, *sizes, ctypes.c_int32)


def assembly(kernels: Iterable[Kernel]) -> str:
    """Assembly text of `kernels`, for people."""
    parsed = _llvm().parse_assembly(module_text(kernels))
    with _machine() as machine:
        _optimize(parsed, machine)
        text: str = machine.emit_assembly(parsed)
    return text


def _optimize(parsed: Any, machine: Any) -> None:
    llvm = _llvm()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = False  # costs time, and the loops are vectors already
    builder = llvm.create_pass_builder(machine, options)
    _unlocked("LLVMPY_RunNewModulePassManager")(builder.getModulePassManager(), parsed, builder)


def _unlocked(name: str) -> Any:
    """A function of LLVM's without llvmlite's lock around it.

    That lock lets one thread at a time into LLVM.  Modules in contexts of their own have nothing
    in common, so these two, which take nearly all of the time, need it not.
    """
    function = getattr(_llvm().ffi.lib, name)
    return getattr(function, "_cfn", function)


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # libraries ask the processor what it can, by an instruction
    return llvm


@contextmanager
def _machine(opt: int = 3, processor: str | None = None) -> Iterator[Any]:
    """One for the processor, which nobody else has meanwhile.

    What it knows of a processor it works out when first asked, a sixth of the time of a small
    kernel: so it is kept for the next module.
    """
    idle = _idle[opt, processor]
    try:
        machine = idle.pop()
    except IndexError:
        machine = _new_target_machine(opt, processor)
    try:
        yield machine
    finally:
        idle.append(machine)


def _new_target_machine(opt: int = 3, processor: str | None = None) -> Any:
    """For one processor, by LLVM's name of it; None: for the one that is here."""
    llvm = _llvm()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten() if processor is None else ""
    # Small code finds constants relative to itself; large code loads an address for each of them.
    return target.create_target_machine(
        opt=opt,
        cpu=processor or llvm.get_host_cpu_name(),
        features=features,
        jit=True,
        reloc="pic",
        codemodel="small",
    )
