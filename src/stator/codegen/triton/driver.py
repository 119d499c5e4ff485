"""The CUDA driver: where its functions are that machine code calls, and its words for errors.

It is opened when it is first asked for: nothing here needs a GPU to be imported.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from typing import Any, Final

from stator.codegen.llvm.libraries import library_function

STEP: Final = 16  # bits of a launcher's result that are CUDA's answer


class Asked(IntEnum):
    """What a launcher asked of CUDA; above CUDA's answer in its result, where that is no 0."""

    LAUNCH = 0
    CONTEXT = 1
    LOAD = 2
    FIND = 3
    SHARED = 4
    STREAM = 5


WORDS: Final = {  # for what could not be done
    Asked.LAUNCH: "could not be launched",
    Asked.CONTEXT: "found no context on its device",
    Asked.LOAD: "could not be loaded",
    Asked.FIND: "was not found in its module",
    Asked.SHARED: "cannot have the shared memory that it needs",
    Asked.STREAM: "was not told torch's current stream",
}


def kernel_function(name: str) -> int:
    """Where a function is that the code of kernels calls: the driver's, or another library's."""
    if not (name.startswith("cu") and name[2:3].isupper()):
        return library_function(name)
    try:
        address = ctypes.cast(getattr(_driver(), name), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise LookupError(f"a launcher calls {name}, which the driver does not have") from error
    assert address is not None, f"{name} has an address"
    return address


def launch_error(kernel: str, code: int) -> RuntimeError:
    """What to raise where a launcher returned `code`."""
    step, answer = divmod(code, 1 << STEP)
    return RuntimeError(f"{kernel} {WORDS[Asked(step)]}: {error_text(answer)}")


def error_text(code: int) -> str:
    """An error of the driver's in its own words."""
    return f"CUDA error {code}" + "".join(f", {word}" for word in _words(code))


def _words(code: int) -> list[str]:
    """Its name and what it means, as far as the driver knows it."""
    try:
        library = _driver()
    except OSError:
        return []
    found = []
    for function in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        if function(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value is not None:
            found.append(text.value.decode(errors="replace"))
    return found


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
