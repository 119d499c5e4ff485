"""A compiled host program: as data, and in this process, callable from Python.

The function that Python calls is a builtin like `len`, made by the C API: no wrapper and no
conversion of arguments stands between the caller and the machine code.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import can_load, load_object
from stator.codegen.triton.driver import kernel_function
from stator.core.events import Held
from stator.core.torch_types import Boxed
from stator.runtime.native.prelude import load_prelude
from stator.torch_api import (
    WRAP_TENSOR,
    entry_of,
    operator_named,
    tensor_is_in_object,
    torch_symbol,
)

ONE_ARGUMENT: Final = 0x0008  # METH_O
# Where CPython has things: checked before the first program runs.
LIST_LENGTH: Final = object.__basicsize__
LIST_ITEMS: Final = LIST_LENGTH + 8
TABLE_IN_SELF: Final = tuple.__basicsize__  # `self` is a tuple; the table, bytes, is its first
TABLE_IN_BYTES: Final = bytes.__basicsize__ - 1  # a zero behind them is counted


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator by its name; in a table it stands for the function behind it."""

    name: str


@dataclass(frozen=True, slots=True)
class Image:
    """A host program and its kernels: object files, and a table of Python objects."""

    host: bytes
    modules: tuple[bytes, ...]  # of kernels
    kernels: tuple[tuple[int, str], ...]  # kernel_0, kernel_1, … of the host: module, name there
    table: tuple[Any, ...]
    prelude: bytes
    held: Held  # bytes that a call was foreseen to hold


class _Method(ctypes.Structure):
    """What the C API is told of a builtin function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


# What torch must export, by where a plan's kernels run.
_NEEDED: Final = {
    "cpu": ("torch_from_blob", "torch_get_num_threads", WRAP_TENSOR),
    "cuda": (
        "aoti_torch__alloc_from_pool",
        "aoti_torch_create_cuda_guard",
        "aoti_torch_delete_cuda_guard",
        "aoti_torch_get_current_cuda_stream",
        WRAP_TENSOR,
    ),
}


@cache
def why_not_native(device: str = "cpu") -> str | None:
    """None if host programs can run here, for a kind of device; otherwise the reason."""
    if not can_load():
        return f"host programs are for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "host programs rely on CPython and its lock"
    words = ctypes.c_uint64 * 8
    row = [object(), object()]
    if words.from_address(id(row))[LIST_LENGTH // 8] != len(row):
        return "lists lie otherwise in memory than expected"
    items = words.from_address(words.from_address(id(row))[LIST_ITEMS // 8])
    if [items[0], items[1]] != [id(row[0]), id(row[1])]:
        return "lists lie otherwise in memory than expected"
    pair = (b"stator", None)
    table = words.from_address(id(pair) + TABLE_IN_SELF)[0]
    if table != id(pair[0]) or ctypes.string_at(table + TABLE_IN_BYTES, 6) != b"stator":
        return "tuples or bytes lie otherwise in memory than expected"
    if not tensor_is_in_object():
        return "tensors lie otherwise in memory than expected"
    missing = [name for name in _NEEDED[device] if torch_symbol(name) is None]
    return f"torch does not export {', '.join(missing)}" if missing else None


def load_image(image: Image, label: str) -> Boxed:
    """The program as a Python function."""
    modules = [load_object(data, kernel_function) for data in image.modules]
    known = {
        **load_prelude(image.prelude),
        **{f"kernel_{i}": modules[m].address(name) for i, (m, name) in enumerate(image.kernels)},
    }
    return bind_host(image, known, label, modules)


def bind_host(image: Image, known: Mapping[str, int], label: str, kept: Any = ()) -> Boxed:
    """The host program as a Python function, its kernels and the prelude being at `known`."""

    def resolve(name: str) -> int:
        return known[name] if name in known else library_function(name)

    code = load_object(image.host, resolve)
    objects = [
        entry_of(operator_named(value.name)) if isinstance(value, Operator) else value
        for value in image.table
    ]
    table = b"".join(id(value).to_bytes(8, sys.byteorder) for value in objects)
    held = (table, code, objects, kept)
    function: Boxed = make_builtin(label, code.address("run"), ONE_ARGUMENT, held)
    return function


def make_builtin(label: str, address: int, flags: int, held: tuple[Any, ...]) -> Any:
    """A builtin function over machine code, whose `self` is `held` and what it needs beside."""
    method = _Method(label.encode(), address, flags, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    # A function lets go of its `self` last: code and objects live as long as it does, and the
    # collector, which looks into `method`, finds it there to the end.
    return make(ctypes.addressof(method), (*held, method), None)
