"""The functions that all host programs share, in this process; its pool and its arenas."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import Any, Final

from stator.codegen.llvm import jit
from stator.torch_api import torch_symbol

_FUNCTIONS: Final = (
    "stator_after_fork",
    "stator_arena_give",
    "stator_arena_take",
    "stator_before_fork",
    "stator_data",
    "stator_drop_all",
    "stator_drop_handle",
    "stator_drop_object",
    "stator_lock",
    "stator_memory",
    "stator_new_tensor",
    "stator_note",
    "stator_to_handle",
    "stator_trim",
    "stator_unlock",
)


@dataclass(frozen=True, slots=True)
class MemoryHeld:
    """Bytes that compiled programs hold in this process, beyond what torch holds."""

    used: int  # outputs and saved values that are alive
    idle: int  # room for more of them
    arenas: int  # room for what lives inside of a call

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, name) / 2**20:.1f} MiB" for name in self.__slots__)
        return ", ".join(parts)


def memory() -> MemoryHeld:
    """What compiled programs hold now."""
    if not _loaded:
        return MemoryHeld(0, 0, 0)
    counts = (ctypes.c_int64 * 3)()
    _function("stator_memory", None, ctypes.c_void_p)(counts)
    return MemoryHeld(*counts)


def trim() -> int:
    """Give memory that waits for the next call back to the system; how many bytes that was."""
    return int(_function("stator_trim", ctypes.c_int64)()) if _loaded else 0


def prelude() -> dict[str, int]:
    """Where each function is; compiled when first asked for."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
    return _loaded[0][0]


_loaded: Final[list[tuple[dict[str, int], jit.Code]]] = []  # at most one
_lock: Final = Lock()


def _load() -> tuple[dict[str, int], jit.Code]:
    text = files(__package__).joinpath("prelude.ll").read_text()
    numbers = {
        "{PROTECTION}": mmap.PROT_READ | mmap.PROT_WRITE,
        "{FLAGS}": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        "{HUGE}": getattr(mmap, "MADV_HUGEPAGE", 14),
    }
    for mark, number in numbers.items():
        text = text.replace(mark, str(number))
    code = jit.load_text(text, address_of, {})
    addresses = {name: code.address(name) for name in _FUNCTIONS}
    # A child must find the mutex free, whatever other threads were doing.
    os.register_at_fork(
        before=ctypes.CFUNCTYPE(None)(addresses["stator_before_fork"]),
        after_in_parent=ctypes.CFUNCTYPE(None)(addresses["stator_after_fork"]),
        after_in_child=ctypes.CFUNCTYPE(None)(addresses["stator_after_fork"]),
    )
    return addresses, code


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    called: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(prelude()[name])
    return called


def address_of(name: str) -> int:
    """Where a function of torch's, Python's or C's library is."""
    found = torch_symbol(name)
    if found is not None:
        return found
    for library in (ctypes.pythonapi, _process()):
        try:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
        assert address is not None, f"{name} has an address"
        return address
    raise LookupError(f"a host program needs {name}, which no library here has")


@cache
def _process() -> Any:
    return ctypes.CDLL(None)
