"""Kernels of eager operators, found by their arguments in native code."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import Any, Final

import torch

from stator.codegen.llvm.jit import compile_text
from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import Code, load_object
from stator.package.native import Container
from stator.runtime.native.image import TABLE_IN_BYTES, TABLE_IN_SELF, make_builtin
from stator.torch_api import DEFAULT_TYPE, TENSOR_IN_OBJECT, WRAP_TENSOR

MOST_WORDS: Final = 240
MOST_OUTPUTS: Final = 16
FIRST_SLOTS: Final = 64  # a power of two
FAST_WITH_KEYWORDS: Final = 0x0080 | 0x0002  # METH_FASTCALL | METH_KEYWORDS


class _Slot(ctypes.Structure):
    _fields_ = (
        ("hash", ctypes.c_uint64),
        ("words", ctypes.c_int64),
        ("key", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("container", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
    )


class _Table(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("slots", ctypes.c_void_p))


@dataclass(eq=False)
class Operator:
    """The kernels of one operator; `function` is what torch calls."""

    miss: Callable[..., Any]
    table: _Table = field(default_factory=_Table)
    kept: list[Any] = field(default_factory=list)  # what addresses in the table point to
    entries: dict[bytes, tuple[int, Any, int, Container]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    function: Any = field(init=False)

    def __post_init__(self) -> None:
        self._resize(FIRST_SLOTS)
        words = (ctypes.addressof(self.table), id(self.miss))
        row = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
        address = _code().address("stator_operator")
        held = (row, self.table, self.miss, self.kept)
        self.function = make_builtin("operator", address, FAST_WITH_KEYWORDS, held)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any], container: Container) -> bool:
        """Remember a kernel for such arguments; whether they can be told apart natively."""
        key = (ctypes.c_int64 * MOST_WORDS)()
        number = ctypes.c_uint64()
        values = (*args, *kwargs.values())
        row = (ctypes.py_object * max(len(values), 1))(*values)
        names = tuple(kwargs)
        words = _key_function()(row, len(args), id(names), key, ctypes.byref(number))
        if words <= 0:
            return False
        name = bytes(key)[: words * 8]
        with self.lock:  # a slot is filled in several steps
            if name in self.entries:  # another thread's
                return True
            self.entries[name] = (number.value, key, words, container)
            if 2 * len(self.entries) > self.table.count:
                self._resize(2 * self.table.count)
            else:
                self._put(self.entries[name], self.kept[-1])
        return True

    def _resize(self, count: int) -> None:
        """A larger table, filled before it takes the old one's place."""
        slots = (_Slot * count)()
        for entry in self.entries.values():
            self._put(entry, slots)
        self.kept.append(slots)  # the old one stays: somebody may be looking into it
        # Count and slots are read one after the other: a larger table first, its count last.
        self.table.slots = ctypes.addressof(slots)
        self.table.count = count

    @staticmethod
    def _put(entry: tuple[int, Any, int, Container], slots: Any) -> None:
        number, key, words, container = entry
        place = number & (len(slots) - 1)
        while slots[place].words:
            place = (place + 1) & (len(slots) - 1)
        slot = slots[place]
        slot.hash, slot.key = number, ctypes.addressof(key)
        slot.container, slot.outputs = container.handle, container.outputs
        slot.function = container.address
        slot.words = words  # last: from here on it is found


@cache
def _code() -> Code:
    text = files(__package__).joinpath("lookup.ll").read_text()
    parts = {
        "{OUTPUTS}": MOST_OUTPUTS,
        "{WRAP}": WRAP_TENSOR,
        "{DEFAULT_TYPE}": DEFAULT_TYPE,
        "{TENSOR}": TENSOR_IN_OBJECT,
        "{TENSOR_TYPE}": id(torch.Tensor),
        "{PARAMETER_TYPE}": id(torch.nn.Parameter),
        "{DTYPE_TYPE}": id(torch.dtype),
        "{TABLE_IN_SELF}": TABLE_IN_SELF,
        "{TABLE_IN_BYTES}": TABLE_IN_BYTES,
    }
    for mark, part in parts.items():
        text = text.replace(mark, str(part))
    return load_object(compile_text(text), library_function)


@cache
def _key_function() -> Any:
    address, number = ctypes.c_void_p, ctypes.c_int64
    kind = ctypes.PYFUNCTYPE(number, address, number, address, address, address)
    return kind(_code().address("stator_key"))
