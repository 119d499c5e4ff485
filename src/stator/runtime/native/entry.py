"""A host program in this process: compiled, bound to its objects, callable from Python.

The function that Python calls is a builtin like `len`, made by the C API: no wrapper and no
conversion of arguments stands between the caller and the machine code.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from stator.codegen.llvm import jit
from stator.core.torch_types import Boxed
from stator.runtime.native.host import LIST_ITEMS, LIST_LENGTH, TABLE_IN_SELF, HostProgram
from stator.runtime.native.prelude import address_of, prelude
from stator.torch_api import WRAP_TENSOR, tensor_is_in_object, torch_symbol

ONE_ARGUMENT: Final = 0x0008  # METH_O


class _Method(ctypes.Structure):
    """What the C API is told of a builtin function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def why_not_native() -> str | None:
    """None if host programs can run here; otherwise the reason, for the log."""
    if not sys.platform.startswith("linux"):
        return f"host programs are written for Linux, not for {sys.platform}"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "host programs rely on CPython and its lock"
    words = ctypes.c_uint64 * 8
    row = [object(), object()]
    if words.from_address(id(row))[LIST_LENGTH // 8] != len(row):
        return "lists lie otherwise in memory than expected"
    items = words.from_address(words.from_address(id(row))[LIST_ITEMS // 8])
    if [items[0], items[1]] != [id(row[0]), id(row[1])]:
        return "lists lie otherwise in memory than expected"
    if ctypes.string_at(id(b"stator") + TABLE_IN_SELF, 6) != b"stator":
        return "bytes lie otherwise in memory than expected"
    if not tensor_is_in_object():
        return "tensors lie otherwise in memory than expected"
    needed = ("torch_from_blob", "torch_get_num_threads", WRAP_TENSOR)
    missing = [name for name in needed if torch_symbol(name) is None]
    return f"torch does not export {', '.join(missing)}" if missing else None


def load_host(program: HostProgram, kernels: Mapping[str, int], name: str) -> Boxed:
    """Compile a host program and make it a Python function."""
    code = jit.load_text(program.text, address_of, {**prelude(), **kernels})
    method = _Method(name.encode(), code.address("run"), ONE_ARGUMENT, None)
    table = b"".join(id(value).to_bytes(8, sys.byteorder) for value in program.table)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p),
    )
    function: Boxed = make(ctypes.addressof(method), table, None)
    # Code and objects live as long as the function does.
    weakref.finalize(function, _forget, code, method, program.table).atexit = False
    return function


def _forget(*_: Any) -> None:
    """The last references go when this returns."""
