"""Calls of operators through torch's dispatcher, from native code.

Each argument goes as one word (torch calls it a StableIValue): a number's bits, a handle that the
callee takes over, or the address of something on the heap.  Results come back in the same words.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import has_number, scalar_type
from stator.runtime.native.frame import Frame
from stator.runtime.native.values import DEVICE_TYPES, Values
from stator.runtime.plan import Call
from stator.torch_api import (
    HigherOrderOperator,
    OpOverload,
    given_arguments,
    out_variant,
    passed_types,
    result_types,
)

# What a type of a schema may be given as.
_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "Tensor": lambda value: isinstance(value, fx.Node),
    "int": lambda value: isinstance(value, fx.Node | int),
    "SymInt": lambda value: isinstance(value, fx.Node | int),
    "float": lambda value: isinstance(value, float | int),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    # The default of a schema is a number already: `randperm`'s, for one.
    "ScalarType": lambda value: isinstance(value, int) or has_number(value),
    "Device": lambda value: isinstance(value, torch.device) and value.type in DEVICE_TYPES,
    "Layout": lambda value: value is torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
}
_FORMATS: Final = {
    torch.contiguous_format: "contiguous_format",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
    torch.preserve_format: "preserve_format",
}
# Those that are numbers known when the library is built.
_NUMBERS: Final[Mapping[str, Callable[[Any], int]]] = {
    "bool": int,
    "float": lambda value: int(struct.unpack("<q", struct.pack("<d", float(value)))[0]),
    "ScalarType": lambda value: value if isinstance(value, int) else scalar_type(value),
}


def why_not_dispatched(call: Call) -> str | None:
    """None if the dispatcher can be given this call; otherwise the reason."""
    if isinstance(call.target, HigherOrderOperator):
        return "it takes functions"
    if not isinstance(call.target, OpOverload):
        return "it is a Python function"
    target = out_variant(call.target) if call.out is not None else call.target
    results = result_types(target)
    if set(results) - {"Tensor"} and (results != ["List[Tensor]"] or call.parts is None):
        return f"it returns {', '.join(results)}, and not tensors"
    given = given_arguments(target, call.args, _keywords(call))
    for kind, value in zip(passed_types(target), given, strict=True):
        if not _fits(kind, value, call):
            return f"an argument of type {kind} cannot be passed ({value})"
    return None


def _keywords(call: Call) -> dict[str, Any]:
    return call.kwargs if call.out is None else {**call.kwargs, "out": call.out}


def _fits(kind: str, value: Any, call: Call) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[9:-1], value, call)
    if kind.startswith("List["):
        items = isinstance(value, list | tuple)
        return items and all(_fits(kind[5:-1], item, call) for item in value)
    if kind == "Tensor" and value is call.out and value is not None:
        return True
    return kind in _FITS and _FITS[kind](value)


@dataclass(slots=True)
class Dispatch:
    """Writes one call."""

    frame: Frame
    values: Values
    integer: Callable[[Any], str]  # a number of the program, known or in a register

    def call(self, call: Call) -> tuple[str, list[int]]:
        """The call: its code, and slots with its results, empty where it failed."""
        frame, is_out = self.frame, call.out is not None
        target = out_variant(call.target) if is_out else call.target
        given = given_arguments(target, call.args, _keywords(call))
        kinds = result_types(target)
        stack = frame.room(max(len(given), len(kinds)))
        for number, (kind, value) in enumerate(zip(passed_types(target), given, strict=True)):
            named = call.name if is_out and value is call.out else value
            frame.put("i64", self._word(kind, named), stack, number)
        name, _, overload = target.name().partition(".")
        frame.unlock()  # they take their time
        code = frame.call(
            "i32",
            "aoti_torch_call_dispatcher",
            f"ptr {frame.text(name)}",
            f"ptr {frame.text(overload)}",
            f"ptr {stack}",
        )
        good = frame.is_zero(code)
        if kinds == ["List[Tensor]"]:
            return code, self._parts(stack, good, call.parts or 0)
        slots = [self._result(stack, good, number) for number in range(len(kinds))]
        if is_out:  # another handle on what the plan has a place for
            frame.drop_handle(slots[0])
            return code, []
        return code, slots

    def _result(self, stack: str, good: str, number: int) -> int:
        """A slot with one of the results."""
        frame, slot = self.frame, self.frame.new_handle()
        at = frame.w.let(f"getelementptr i64, ptr {stack}, i64 {number}")
        word = frame.w.let(f"load ptr, ptr {at}")
        handle = frame.w.let(f"select i1 {good}, ptr {word}, ptr null")
        frame.w.line(f"store ptr {handle}, ptr {frame.handle_at(slot)}")
        return slot

    def _parts(self, stack: str, good: str, count: int) -> list[int]:
        """Slots with all that the list of results holds; the list goes."""
        frame = self.frame
        slots = [frame.new_handle() for _ in range(count)]
        take, on = frame.w.name("take"), frame.w.name("on")
        frame.w.line(f"br i1 {good}, label %{take}, label %{on}")
        frame.w.open_block(take)
        row = frame.w.let(f"load ptr, ptr {stack}")
        for number, slot in enumerate(slots):
            given = [f"ptr {row}", f"i64 {number}", f"ptr {frame.handle_at(slot)}"]
            frame.call("i32", "torch_list_get_item", *given)
        frame.call("i32", "torch_delete_list", f"ptr {row}")
        frame.w.line(f"br label %{on}")
        frame.w.open_block(on)
        return slots

    def _word(self, kind: str, value: Any) -> str:
        """An argument as a word."""
        if kind.startswith("Optional["):
            return "0" if value is None else self._on_the_heap(self._word(kind[9:-1], value))
        if kind.startswith("List["):
            return self._list([self._word(kind[5:-1], item) for item in value])
        match kind:
            case "Tensor":
                return self._tensor(value if isinstance(value, str) else value.name)
            case "int" | "SymInt":
                return self.integer(value)
            case "str":
                return self._text(value)
            case "Device":
                return self.values.device_word(value)
            case "Layout":
                return self._code("aoti_torch_layout_strided")
            case "MemoryFormat":
                return self._code(f"aoti_torch_memory_format_{_FORMATS[value]}")
            case _:
                return str(_NUMBERS[kind](value))

    def _tensor(self, name: str) -> str:
        """A handle of its own, which the callee takes over."""
        frame, room = self.frame, self.frame.room(1)
        handle = self.values.handle(name)
        code = frame.call("i32", "aoti_torch_new_tensor_handle", f"ptr {handle}", f"ptr {room}")
        frame.require_memory(frame.is_zero(code))
        return frame.w.let(f"load i64, ptr {room}")

    def _on_the_heap(self, word: str) -> str:
        frame = self.frame
        cell = frame.call("ptr", "_Znwm", "i64 8")
        frame.w.line(f"store i64 {word}, ptr {cell}")
        return frame.w.let(f"ptrtoint ptr {cell} to i64")

    def _list(self, words: list[str]) -> str:
        frame, room = self.frame, self.frame.room(1)
        frame.call("i32", "torch_new_list_reserve_size", f"i64 {len(words)}", f"ptr {room}")
        row = frame.w.let(f"load ptr, ptr {room}")
        for word in words:
            frame.call("i32", "torch_list_push_back", f"ptr {row}", f"i64 {word}")
        return frame.w.let(f"ptrtoint ptr {row} to i64")

    def _text(self, value: str) -> str:
        frame, room = self.frame, self.frame.room(1)
        given = [f"ptr {frame.text(value)}", f"i64 {len(value.encode())}", f"ptr {room}"]
        frame.call("i32", "torch_new_string_handle", *given)
        return frame.w.let(f"load i64, ptr {room}")

    def _code(self, function: str) -> str:
        """What one of torch's functions calls something."""
        code = self.frame.call("i32", function)
        return self.frame.w.let(f"zext i32 {code} to i64")
