"""Calls of operators from a host program: torch's C functions, or any function through Python."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from stator.runtime.native.dispatch import Dispatch, why_not_dispatched
from stator.runtime.native.frame import Frame
from stator.runtime.native.image import Operator
from stator.runtime.native.shims import PASSED_AS
from stator.runtime.native.values import (
    Handle,
    Look,
    Numeric,
    Object,
    Parts,
    Planned,
    Reference,
    Slot,
    Values,
)
from stator.runtime.plan import Call
from stator.runtime.rare import dict_of
from stator.torch_api import OpOverload, argument_types, given_arguments, out_variant, result_types

LIBRARIES: Final = ("onednn", "mkldnn", "mkl")  # by the names under which torch has them


@dataclass(slots=True)
class Calls:
    """Writes calls."""

    frame: Frame
    values: Values

    def run(self, call: Call) -> None:
        """The call; its result becomes a value."""
        places = self.values.places
        source = places.get(call.args[0].name) if call.target is operator.getitem else None
        if isinstance(source, Parts):
            found = source.parts[call.args[1]]
            is_number = isinstance(found, Numeric)
            places[call.name] = found if is_number else Handle(self.part(source, call.args[1]))
        elif isinstance(source, Object):
            places[call.name] = Object(self.frame.keep_object(self._item(call)))
        elif call.symbol is not None and self.is_passable(call):
            self.shim(call, call.symbol)
        elif _is_quick(call) and why_not_dispatched(call) is None:
            self.dispatch(call)
        else:
            result = self._python(call)
            places[call.name] = Object(self.frame.keep_object(result))

    # --- results with several parts ---

    def part(self, parts: Parts, index: int) -> int:
        """A slot with one of the results."""
        frame, found = self.frame, parts.parts[index]
        assert isinstance(found, Handle), "a number has no slot"
        slot = frame.new_handle()
        whole, own = frame.load_handle(found.slot), frame.handle_at(slot)
        frame.call("i32", "aoti_torch_new_tensor_handle", f"ptr {whole}", f"ptr {own}")
        return slot

    def _item(self, call: Call) -> str:
        frame = self.frame
        frame.lock()
        source, index = (self._reference(argument) for argument in call.args)
        item = frame.call("ptr", "PyObject_GetItem", f"ptr {source.value}", f"ptr {index.value}")
        self.values.release(index)
        frame.require(frame.is_set(item))
        return item

    # --- through Python ---

    def _python(self, call: Call) -> str:
        """Call the operator's Python object."""
        self.frame.lock()
        is_out = call.out is not None
        target = out_variant(call.target) if is_out else call.target
        is_operator = isinstance(target, OpOverload)
        function = self.values.fixed(Operator(target.name()) if is_operator else target)
        words = [self._word(argument) for argument in (*call.args, *call.kwargs.values())]
        words += [self._word_of(call.name)] if is_out else []
        known = [word for word in words if word is not None]
        if len(known) == len(words):
            names = (*call.kwargs, "out") if is_out else tuple(call.kwargs)
            return self._call_described(function, known, names)
        given = [self._reference(argument) for argument in call.args]
        named = {k: self._reference(value) for k, value in call.kwargs.items()}
        if is_out:
            named["out"] = self.values.object(call.name)
        return self.values.call_object(function, [*given, *named.values()], tuple(named))

    def _call_described(self, function: Reference, words: list[int], names: tuple[str, ...]) -> str:
        """A call whose arguments the prelude gathers: less code for what is rare or slow anyway."""
        frame = self.frame
        result = frame.call(
            "ptr",
            "stator_call",
            f"ptr {function.value}",
            f"ptr {frame.numbers(words)}",
            f"i64 {len(words)}",
            f"i64 {len(names)}",
            f"ptr {frame.python(names) if names else 'null'}",
            "ptr %table",
            "ptr %objects",
            "ptr %handles",
        )
        frame.require(frame.is_set(result))
        return result

    def _word(self, value: Any) -> int | None:
        """Where the prelude finds an argument; None where it takes code to make it."""
        if isinstance(value, fx.Node):
            return self._word_of(value.name)
        return None if has_nodes(value) else self.frame.in_table(value) << 2

    def _word_of(self, name: str) -> int | None:
        match self.values.places[name]:
            case Object(slot):
                return slot << 2 | 1
            case Handle(slot):
                return slot << 2 | 2
            case Planned() | Look():
                return self.values.view(name) << 2 | 2
            case _:
                return None

    def _reference(self, value: Any) -> Reference:
        """An argument as a Python object."""
        if isinstance(value, fx.Node):
            return self.values.object(value.name)
        if not has_nodes(value):
            return self.values.fixed(value)
        if isinstance(value, dict):
            return self._built(dict_of, [tuple(value), *value.values()])
        if isinstance(value, slice):
            return self._built(slice, [value.start, value.stop, value.step])
        items = [self._reference(item) for item in value]
        return self.values.row_of(items, "Tuple" if isinstance(value, tuple) else "List")

    def _built(self, maker: Any, parts: Sequence[Any]) -> Reference:
        given = [self._reference(part) for part in parts]
        return Reference(self.values.call_object(self.values.fixed(maker), given), True)

    # --- torch's C functions ---

    def is_passable(self, call: Call) -> bool:
        given = given_arguments(call.target, call.args, call.kwargs)
        return all(map(self._fits, argument_types(call.target), given))

    def _fits(self, kind: str, value: Any) -> bool:
        """Whether the C function can be given this value."""
        places = self.values.places
        match kind:
            case "Tensor" | "Optional[Tensor]":
                return value is None or isinstance(value, fx.Node)
            case "int" | "Optional[int]":
                is_number = isinstance(value, fx.Node) and isinstance(places[value.name], Numeric)
                return is_number or isinstance(value, int | None)
            case "List[int]" | "Optional[List[int]]":
                return value is None or all(self._fits("int", item) for item in value)
            case "List[Optional[number]]":
                return not value
            case "number" if isinstance(value, int):
                return int(float(value)) == value  # it goes as a double
            case _:
                return kind in PASSED_AS and not has_nodes(value) and not _is_complex(value)

    def shim(self, call: Call, symbol: str) -> None:
        """Call one of torch's C functions."""
        frame, values = self.frame, self.values
        passed: list[str] = []
        if call.out is not None:
            passed.append(f"ptr {values.handle(call.name)}")
        arguments = given_arguments(call.target, call.args, call.kwargs)
        undefined: list[int] = []
        for kind, value in zip(argument_types(call.target), arguments, strict=True):
            if kind == "Tensor" and value is None:
                undefined.append(self._undefined())
                passed.append(f"ptr {frame.load_handle(undefined[-1])}")
            else:
                passed += self._passed(kind, value)
        slots: list[Slot] = []
        if call.out is None:
            kinds = result_types(call.target)
            slots = [frame.new_handle() if kind == "Tensor" else frame.room(1) for kind in kinds]
            passed += [f"ptr {s if isinstance(s, str) else frame.handle_at(s)}" for s in slots]
        frame.unlock()  # they take their time
        self.check(frame.call("i32", symbol, *passed), call, slots)
        for slot in undefined:
            frame.drop_handle(slot)
        parts = tuple(self._made(slot) for slot in slots)
        if parts:
            values.places[call.name] = parts[0] if len(parts) == 1 else Parts(parts)

    def _made(self, slot: Slot) -> Handle | Numeric:
        """A result that a C function left somewhere."""
        if isinstance(slot, int):
            return Handle(slot)
        return Numeric(self.frame.w.let(f"load i64, ptr {slot}"))

    def dispatch(self, call: Call) -> None:
        """Call an operator by its name."""
        code, slots = Dispatch(self.frame, self.values, self.integer).call(call)
        self.check(code, call, slots)
        if len(slots) == 1 and call.parts is None:
            self.values.places[call.name] = Handle(slots[0])
        elif call.out is None:
            self.values.places[call.name] = Parts(tuple(map(Handle, slots)))

    def check(self, code: str, call: Call, slots: Sequence[Slot]) -> None:
        """What fails is done again by Python, which raises what eager raises, or does it."""
        with self.frame.unless(self.frame.is_zero(code)):
            self._again(self._python(call), slots)

    def _again(self, result: str, slots: Sequence[Slot]) -> None:
        """Put what Python returned where the C function would have put it."""
        frame, values = self.frame, self.values
        if len(slots) == 1:
            self._put(result, slots[0])
            return
        for number, slot in enumerate(slots):
            item = frame.call("ptr", "PySequence_GetItem", f"ptr {result}", f"i64 {number}")
            self._put(item, slot)
        values.release(Reference(result, True))

    def _put(self, item: str, slot: Slot) -> None:
        """A result of Python's, of which we have a reference, where a C function's would be."""
        if isinstance(slot, int):
            self.values.to_handle(item, slot)
            return
        number = self.frame.call("i64", "PyLong_AsLongLong", f"ptr {item}")
        self.frame.w.line(f"store i64 {number}, ptr {slot}")
        self.values.release(Reference(item, True))

    def _passed(self, kind: str, value: Any) -> list[str]:
        """An argument as C has it."""
        types = PASSED_AS[kind]
        if kind.startswith("Optional["):
            if value is None:
                return [f"{types[0]} null", *(f"{other} 0" for other in types[1:])]
            inside = self._passed(kind.removeprefix("Optional[").removesuffix("]"), value)
            room = self.frame.room(1)
            inner, held = inside[0].split(" ", 1)
            self.frame.put(inner, held, room, 0)
            return [f"ptr {room}", *inside[1:]]
        match kind:
            case "Tensor":
                return [f"ptr {self.values.handle(value.name)}"]
            case "int":
                return [f"i64 {self.integer(value)}"]
            case "float" | "number":
                return [f"double {double(value)}"]
            case "bool":
                return [f"i32 {int(value)}"]
            case "str":
                return [f"ptr {self.frame.text(value)}"]
            case "List[int]":
                return [f"ptr {self._integers(value)}", f"i64 {len(value)}"]
            case "List[bool]":
                flags = ", ".join(f"i32 {int(flag)}" for flag in value)
                row = self.frame.constant(f"[{len(value)} x i32] [{flags}]")
                return [f"ptr {row}", f"i64 {len(value)}"]
            case _:
                return ["ptr null", "i64 0"]  # an empty list

    def _undefined(self) -> int:
        """The slot of a tensor that is none, where a schema wants one and Python passes None."""
        frame = self.frame
        slot = frame.new_handle()
        given = f"ptr {frame.handle_at(slot)}"
        code = frame.call("i32", "aoti_torch_new_uninitialized_tensor", given)
        frame.require_memory(frame.is_zero(code))
        return slot

    def integer(self, value: Any) -> str:
        """A number of the program, known or in a register."""
        if not isinstance(value, fx.Node):
            return str(int(value))
        place = self.values.places[value.name]
        assert isinstance(place, Numeric), "arguments were looked at before"
        return place.value

    def _integers(self, values: Sequence[Any]) -> str:
        if not any(isinstance(value, fx.Node) for value in values):
            return self.frame.numbers([int(value) for value in values])
        room = self.frame.room(len(values))
        for number, value in enumerate(values):
            self.frame.put("i64", self.integer(value), room, number)
        return room


def _is_quick(call: Call) -> bool:
    """Whether it is one of a library's, which do nothing when they fail: Python may try again."""
    return isinstance(call.target, OpOverload) and call.target.namespace in LIBRARIES


def has_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return bool(found)


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex)


def double(value: float) -> str:
    """A number as LLVM writes it exactly."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(value)))
    return f"0x{bits:016X}"
