"""The functions that all host programs share, in this process; its pool and its arenas."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from threading import Lock
from typing import Any, Final

from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import Code, load_object
from stator.torch_api import TENSOR_IN_OBJECT, WRAP_TENSOR


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """Bytes that compiled programs hold in this process, beyond what torch holds."""

    used: int  # outputs and saved values that are alive
    idle: int  # room for more of them
    arenas: int  # room for what lives inside of a call
    peak: int  # the most that was used at once, since the last trim

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name) / 2**20:.1f} MiB" for name in self.__slots__)
        return ", ".join(parts)


def memory() -> MemoryHeld:
    """What compiled programs hold now."""
    if not _loaded:
        return MemoryHeld(0, 0, 0, 0)
    counts = (ctypes.c_int64 * 4)()
    _function("stator_memory", None, ctypes.c_void_p)(counts)
    return MemoryHeld(*counts)


def trim() -> int:
    """Give memory that waits for the next call back to the system; how many bytes that was."""
    return int(_function("stator_trim", ctypes.c_int64)()) if _loaded else 0


def hold_no_spare() -> None:
    """Keep idle pages only as far as all together were in use at once: for programs with a limit.

    For the whole process, from now on; pages between values in use may be faulted in again.
    """
    set_spare(0)


def set_spare(count: int) -> None:
    """How many idle bytes may wait beyond what was used at once, in this process."""
    with _lock:
        _spare[:] = [count]
        if _loaded:
            _function("stator_set_spare", None, ctypes.c_int64)(count)


def sampler() -> Callable[[Any, int], int] | None:
    """Makes a number of a few words of memory, at addresses and lengths in words; None: no code."""
    if not _loaded:
        return None
    return _function("stator_sample", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def load_prelude(data: bytes) -> dict[str, int]:
    """Where each function is; loaded from its object file when first asked for."""
    with _lock:
        if not _loaded:
            _loaded.append(_load(data))
            for count in _spare:
                _function("stator_set_spare", None, ctypes.c_int64)(count)
    return _loaded[0].symbols


def prelude_text() -> str:
    """LLVM text of all that programs share which Python runs, for this system."""
    return memory_text() + _filled("python.ll")


def memory_text() -> str:
    """LLVM text of the pool and the arenas, which need no Python."""
    return _filled("memory.ll") + _filled("pool.ll")


def _filled(name: str) -> str:
    text = files(__package__).joinpath(name).read_text()
    parts = {
        "{WRAP}": WRAP_TENSOR,
        "{TENSOR}": TENSOR_IN_OBJECT,
        "{PROTECTION}": mmap.PROT_READ | mmap.PROT_WRITE,
        "{FLAGS}": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        "{RESERVING}": mmap.MAP_PRIVATE
        | mmap.MAP_ANONYMOUS
        | getattr(mmap, "MAP_NORESERVE", 0x4000),
        "{HUGE}": getattr(mmap, "MADV_HUGEPAGE", 14),
        "{DONT_NEED}": getattr(mmap, "MADV_DONTNEED", 4),
    }
    for mark, part in parts.items():
        text = text.replace(mark, str(part))
    return text


_loaded: Final[list[Code]] = []  # at most one
_spare: Final[list[int]] = []  # at most one: what to set once it is loaded
_lock: Final = Lock()


def _load(data: bytes) -> Code:
    code = load_object(data, library_function)
    # Tensors on our memory may be the last that a process lets go of: their deleter stays.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(code.memory))
    # A child must find the mutex free, whatever other threads were doing.  C's own hooks: between
    # Python's, another thread may hold Python's lock and wait for the mutex.
    before, after = code.address("stator_before_fork"), code.address("stator_after_fork")
    register = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    register(library_function("__register_atfork"))(before, after, after, None)
    return code


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    called: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(_loaded[0].address(name))
    return called
