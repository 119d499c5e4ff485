"""Launchers: native functions that put a kernel of the GPU on torch's current stream.

i32 NAME(buffers…, sizes…, threads)   as an entry of the CPU's, but for the result: 0, or an error
i32 NAME(buffers…, sizes…, device)    where the device is not known before it is launched

A launcher's module carries the cubin, so that its object file is all there is to store or ship.
The first launch loads it into the device's primary context, which is torch's; there it stays as
long as the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stator.codegen.llvm.indices import Indices
from stator.codegen.llvm.jit import Module, compile_text
from stator.codegen.llvm.objects import load_object
from stator.codegen.triton.driver import STEP, Asked, kernel_function, launch_error
from stator.loops.index import Index, Symbol

# How the entry's arguments may be handed on; "": the kernel does not take it.
PASSED: Final = {"ptr": ("ptr", ""), "i64": ("i64", "i32", "")}
TOO_MANY: Final = 1 << 31  # blocks along a dimension
SHARED_AT_MOST: Final = 48 << 10  # bytes that a kernel gets without asking
# Of CUDA's:
MAX_DYNAMIC_SHARED: Final = 8  # the attribute with which it asks
INVALID_CONTEXT: Final = 201  # no call has made one current in this thread yet
UNKNOWN: Final = 999
RELAXED: Final = 2  # the mode of a thread that may do anything while a stream is recorded
MOST_DEVICES: Final = 128  # torch numbers them in a byte


@dataclass(frozen=True, slots=True)
class Launcher:
    """A kernel of the GPU, and how it is launched."""

    name: str  # the launcher's
    function: str  # the kernel's, in the cubin
    cubin: bytes
    passed: tuple[str, ...]  # how each buffer and then each size is handed on: see PASSED
    symbols: tuple[Symbol, ...]  # the sizes, in the order that the entry takes them
    grid: tuple[Index, Index, Index]  # over the sizes
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory
    device: int | None  # None: it is told at every launch
    scratch: int = 2  # parameters of the kernel behind its own, which are null

    @property
    def buffers(self) -> int:
        """How many buffers come before the sizes."""
        return len(self.passed) - len(self.symbols)

    @property
    def number(self) -> str:
        """The device, in the text of the function."""
        return "%device" if self.device is None else str(self.device)

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Types and names of what the entry takes, but for the number of threads."""
        buffers = [("ptr", f"buffer.{number}") for number in range(self.buffers)]
        return [*buffers, *(("i64", symbol.name) for symbol in self.symbols)]


def load(launchers: Sequence[Launcher], resolve: Callable[[str], int] = kernel_function) -> Module:
    """Compile launchers and make them callable; `resolve` finds the functions that they call."""
    data = compile_text(module_text(launchers))
    code = load_object(data, resolve)
    entries = {
        launcher.name: _checked(launcher, code.address(launcher.name)) for launcher in launchers
    }
    return Module((), code, entries, data)


def _checked(launcher: Launcher, address: int) -> Any:
    """A launcher for Python: it raises what went wrong."""
    kinds = [
        ctypes.c_void_p if kind == "ptr" else ctypes.c_int64 for kind, _ in launcher.parameters
    ]
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds, ctypes.c_int32)(address)

    def check(code: int, *_: Any) -> None:
        if code:
            raise launch_error(launcher.name, code)

    function.errcheck = check
    return function


def module_text(launchers: Sequence[Launcher]) -> str:
    """LLVM text of a module with all `launchers`."""
    return "\n".join((_LOADING, *map(launcher_text, launchers)))


def launcher_text(launcher: Launcher) -> str:
    """LLVM text of one: the cubin, places of the loaded kernel by device, and the function."""
    code = Indices()
    w, name = code.w, launcher.name
    cells, last = (1, "threads") if launcher.device is not None else (MOST_DEVICES, "device")
    parameters = _parameters(code, launcher)
    grid = [code.index(size) for size in launcher.grid]
    w.line("%stream_at = alloca ptr")
    empty = "false"
    for size in grid:
        empty = w.let(f"or i1 {empty}, {w.let(f'icmp slt i64 {size}, 1')}")
    w.line(f"br i1 {empty}, label %done, label %look")
    w.open_block("done")
    w.line("ret i32 0")
    w.open_block("look")
    own = launcher.number if launcher.device is None else "0"
    w.line(f"%cell = getelementptr ptr, ptr @{name}.loaded, i32 {own}")
    known = w.let("load atomic ptr, ptr %cell acquire, align 8")
    w.line(f"br i1 {w.let(f'icmp ne ptr {known}, null')}, label %ready, label %load")
    w.open_block("load")
    given = f"ptr @{name}.cubin, ptr @{name}.function, i32 {launcher.shared}"
    refused = w.let(f"call i32 @load({given}, i32 {launcher.number}, ptr %cell)")
    w.line(f"br i1 {w.let(f'icmp eq i32 {refused}, 0')}, label %ready, label %refuse")
    w.open_block("refuse")
    w.line(f"ret i32 {refused}")
    w.open_block("ready")
    _launch(code, launcher, grid, parameters)
    taken = [*(f"{kind} %{given}" for kind, given in launcher.parameters), f"i32 %{last}"]
    return "\n".join(
        (
            f"@{name}.cubin = internal constant {_bytes(launcher.cubin)}, align 64",
            f"@{name}.function = internal constant {_bytes(launcher.function.encode() + bytes(1))}",
            f"@{name}.loaded = internal global [{cells} x ptr] zeroinitializer, align 8",
            f"define i32 @{name}({', '.join(taken)}) {{\nentry:",
            *w.lines,
            "}",
        )
    )


def _parameters(code: Indices, launcher: Launcher) -> str:
    """A row of the addresses of all that the kernel is given."""
    w = code.w
    cells = []
    for kind, (own, name) in zip(launcher.passed, launcher.parameters, strict=True):
        assert kind in PASSED[own], f"{name}, a {own}, cannot be handed on as {kind}"
        if kind:
            value = f"%{name}" if kind == own else w.let(f"trunc {own} %{name} to {kind}")
            cells.append(w.let(f"alloca {kind}, align 8"))
            w.line(f"store {kind} {value}, ptr {cells[-1]}")
    if launcher.scratch:
        nothing = w.let("alloca ptr")
        w.line(f"store ptr null, ptr {nothing}")
        cells += [nothing] * launcher.scratch
    row = w.let(f"alloca [{max(len(cells), 1)} x ptr], align 8")
    for number, cell in enumerate(cells):
        w.line(f"store ptr {cell}, ptr {w.let(f'getelementptr ptr, ptr {row}, i64 {number}')}")
    return row


def _launch(code: Indices, launcher: Launcher, grid: Sequence[str], parameters: str) -> None:
    """Launch on the current stream; once more, if this thread had no context so far."""
    w, device = code.w, launcher.number
    function = w.let("load atomic ptr, ptr %cell acquire, align 8")
    asked = w.let(f"call i32 @aoti_torch_get_current_cuda_stream(i32 {device}, ptr %stream_at)")
    w.line(f"br i1 {w.let(f'icmp eq i32 {asked}, 0')}, label %launch, label %lost")
    w.open_block("lost")
    w.line(f"ret i32 {Asked.STREAM << STEP | UNKNOWN}")
    w.open_block("launch")
    stream = w.let("load ptr, ptr %stream_at")
    # More than a grid can have stay too many, for the driver to refuse.
    most = [w.let(f"call i64 @llvm.umin.i64(i64 {size}, i64 {TOO_MANY})") for size in grid]
    blocks = [f"i32 {w.let(f'trunc i64 {size} to i32')}" for size in most]
    given = [f"ptr {function}", *blocks, f"i32 {launcher.threads}", "i32 1", "i32 1"]
    given += [f"i32 {launcher.shared}", f"ptr {stream}", f"ptr {parameters}", "ptr null"]
    first = w.let(f"call i32 @cuLaunchKernel({', '.join(given)})")
    bare = w.let(f"icmp eq i32 {first}, {INVALID_CONTEXT}")
    w.line(f"br i1 {bare}, label %again, label %launched")
    w.open_block("launched")
    w.line(f"ret i32 {first}")
    w.open_block("again")
    w.line(f"call i32 @make_current(i32 {device})")
    second = w.let(f"call i32 @cuLaunchKernel({', '.join(given)})")
    w.line(f"ret i32 {second}")


def _bytes(data: bytes) -> str:
    return f'[{len(data)} x i8] c"' + "\\" + data.hex("\\") + '"'


def _failing(asked: Asked, code: str) -> str:
    return f"or i32 {asked << STEP}, {code}"


_LOADING: Final = f"""
declare i32 @cuInit(i32) nonlazybind
declare i32 @cuDevicePrimaryCtxRetain(ptr, i32) nonlazybind
declare i32 @cuCtxSetCurrent(ptr) nonlazybind
declare i32 @cuThreadExchangeStreamCaptureMode(ptr) nonlazybind
declare i32 @cuModuleLoadData(ptr, ptr) nonlazybind
declare i32 @cuModuleGetFunction(ptr, ptr, ptr) nonlazybind
declare i32 @cuFuncSetAttribute(ptr, i32, i32) nonlazybind
declare i32 @cuLaunchKernel(ptr, i32, i32, i32, i32, i32, i32, i32, ptr, ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_current_cuda_stream(i32, ptr) nonlazybind
declare i64 @llvm.umin.i64(i64, i64)

; Make the primary context of a device that of this thread: torch does so when it first calls CUDA.
define internal i32 @make_current(i32 %device) {{
  %context_at = alloca ptr
  call i32 @cuInit(i32 0)               ; done before, by torch: what follows tells
  %retained = call i32 @cuDevicePrimaryCtxRetain(ptr %context_at, i32 %device)
  %good = icmp eq i32 %retained, 0
  br i1 %good, label %set, label %fail
set:
  %context = load ptr, ptr %context_at
  %answer = call i32 @cuCtxSetCurrent(ptr %context)
  ret i32 %answer
fail:
  ret i32 %retained
}}

; The same as below, also while somebody records a CUDA graph: nothing of it belongs there, but a
; recording that does not allow for it would be lost.
define internal i32 @load(ptr %cubin, ptr %name, i32 %shared, i32 %device, ptr %cell) {{
  %mode_at = alloca i32
  store i32 {RELAXED}, ptr %mode_at
  %exchanged = call i32 @cuThreadExchangeStreamCaptureMode(ptr %mode_at)  ; it holds the old one now
  %code = call i32 @load_relaxed(ptr %cubin, ptr %name, i32 %shared, i32 %device, ptr %cell)
  %is_exchanged = icmp eq i32 %exchanged, 0
  br i1 %is_exchanged, label %back, label %done
back:
  call i32 @cuThreadExchangeStreamCaptureMode(ptr %mode_at)
  br label %done
done:
  ret i32 %code
}}

; Load a kernel and put it into its cell.  Two threads at once both load it, and either is right.
define internal i32 @load_relaxed(ptr %cubin, ptr %name, i32 %shared, i32 %device, ptr %cell) {{
  %module_at = alloca ptr
  %function_at = alloca ptr
  %current = call i32 @make_current(i32 %device)
  %is_current = icmp eq i32 %current, 0
  br i1 %is_current, label %read, label %no_context
no_context:
  %failed_0 = {_failing(Asked.CONTEXT, "%current")}
  ret i32 %failed_0
read:
  %loaded = call i32 @cuModuleLoadData(ptr %module_at, ptr %cubin)
  %is_loaded = icmp eq i32 %loaded, 0
  br i1 %is_loaded, label %find, label %no_module
no_module:
  %failed_1 = {_failing(Asked.LOAD, "%loaded")}
  ret i32 %failed_1
find:
  %module = load ptr, ptr %module_at
  %found = call i32 @cuModuleGetFunction(ptr %function_at, ptr %module, ptr %name)
  %is_found = icmp eq i32 %found, 0
  br i1 %is_found, label %weigh, label %no_function
no_function:
  %failed_2 = {_failing(Asked.FIND, "%found")}
  ret i32 %failed_2
weigh:
  %function = load ptr, ptr %function_at
  %much = icmp sgt i32 %shared, {SHARED_AT_MOST}
  br i1 %much, label %ask, label %keep
ask:
  %allowed = call i32 @cuFuncSetAttribute(ptr %function, i32 {MAX_DYNAMIC_SHARED}, i32 %shared)
  %is_allowed = icmp eq i32 %allowed, 0
  br i1 %is_allowed, label %keep, label %too_much
too_much:
  %failed_3 = {_failing(Asked.SHARED, "%allowed")}
  ret i32 %failed_3
keep:
  store atomic ptr %function, ptr %cell release, align 8
  ret i32 0
}}
"""
