"""Where the values of a program are while it runs, and one form of them made from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from stator.core.dtypes import scalar_type
from stator.loops.index import Index
from stator.runtime.native.frame import Frame
from stator.runtime.plan import ALIGNED, CPU, Allocation, View
from stator.runtime.rare import as_planned, empty_strided, refuse
from stator.torch_api import TENSOR_IN_OBJECT, WRAP_TENSOR


@dataclass(frozen=True, slots=True)
class Object:
    """A Python object that the program holds a reference to."""

    slot: int


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor without a Python object."""

    slot: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A buffer in the arena."""

    made: Allocation


@dataclass(frozen=True, slots=True)
class Look:
    """Another look at the memory of a tensor outside of the arena."""

    root: str
    made: Allocation
    offset: Index  # from the root's first element


@dataclass(frozen=True, slots=True)
class Numeric:
    """An integer in a register."""

    value: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What an operator with several results returned."""

    parts: tuple[Handle | Numeric, ...]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A tensor that somebody else holds, in a row of handles."""

    row: str  # the row's register
    number: int


Place: TypeAlias = Object | Handle | Planned | Look | Numeric | Parts | Borrowed
# Where a C function puts a result: a slot of handles, or a room for a number.
Slot: TypeAlias = int | str
ARENA: Final = "arena of the call"  # of a GPU: a tensor, under a name that no graph has
DEVICE_TYPES: Final = {"cpu": 0, "cuda": 1}  # by their numbers in C++
Layouts: TypeAlias = Mapping[str, tuple[tuple[Index, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A Python object in a register."""

    value: str
    owned: bool = False  # whether the code that asked for it must let go of it


@dataclass(slots=True)
class Values:
    """The values that are alive where code is being written."""

    frame: Frame
    layouts: Layouts  # of tensors that kernels rely on
    written: frozenset[str]  # that some kernel stores into
    callers: frozenset[str]  # inputs: what is written of these cannot be replaced
    places: dict[str, Place] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)  # of data
    tuples: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, int] = field(default_factory=dict)  # handles on buffers of the arena
    device: torch.device = CPU  # where tensors are made
    loose: frozenset[str] = frozenset()  # kernels expect nothing of where these begin

    # --- making and freeing ---

    def make(self, made: Allocation) -> None:
        """A tensor that may leave the program."""
        frame = self.frame
        slot, data = frame.new_handle(), frame.room(1)
        layout = [
            f"i64 {len(made.size)}",
            f"ptr {frame.array(made.size)}",
            f"ptr {frame.array(made.stride)}",
            f"i32 {scalar_type(made.dtype)}",
        ]
        to = [f"ptr {frame.handle_at(slot)}", f"ptr {data}"]
        if self.device.type == "cpu":
            size = frame.index(made.elements * made.dtype.itemsize)
            code = frame.call("i32", "stator_new_tensor", f"i64 {size}", *layout, *to)
        else:
            code = frame.call("i32", "stator_new_on", *layout, *self.on_device(), *to)
        self.without_memory(code, made, slot, data)
        self.places[made.name] = Handle(slot)
        self.addresses[made.name] = frame.w.let(f"load ptr, ptr {data}")

    def device_word(self, device: torch.device) -> str:
        """A device as torch's dispatcher takes it: its kind, and its number (-1: none is named)."""
        number = 0xFFFFFFFF if device.index is None else device.index
        return str(DEVICE_TYPES[device.type] << 32 | number)

    def on_device(self) -> list[str]:
        """The device as torch's C functions take it; without a number it is the current one."""
        number = -1 if self.device.index is None else self.device.index
        return [f"i32 {DEVICE_TYPES[self.device.type]}", f"i32 {number}"]

    def without_memory(self, code: str, made: Allocation, slot: int, data: str) -> None:
        """Where a tensor could not be made: torch says why not, or finds memory after all."""
        frame = self.frame
        with frame.unless(frame.is_zero(code)):
            given = [self.sizes(made.size), self.sizes(made.stride), self.fixed(made.dtype)]
            given += [] if self.device.type == "cpu" else [self.fixed(self.device)]
            self.to_handle(self.call_object(self.fixed(empty_strided), given), slot)
            handle = frame.load_handle(slot)
            frame.call("i32", "torch_get_mutable_data_ptr", f"ptr {handle}", f"ptr {data}")

    def take(self, name: str, value: Any) -> None:
        """A Python object of the table, under a name."""
        self.frame.lock()
        held = self.frame.python(value)
        self.frame.call("void", "Py_IncRef", f"ptr {held}")
        self.places[name] = Object(self.frame.keep_object(held))

    def open_arena(self, size: Index) -> None:
        """An arena on a GPU: a tensor for the length of the call."""
        self.make(Allocation(ARENA, (size,), (Index.of(1),), torch.uint8))
        self.frame.w.line(f"%arena = getelementptr i8, ptr {self.addresses[ARENA]}, i64 0")

    def plan(self, made: Allocation, offset: Index) -> None:
        """A buffer at its place in the arena."""
        self.places[made.name] = Planned(made)
        start = self.frame.index(offset)
        self.addresses[made.name] = self.frame.w.let(f"getelementptr i8, ptr %arena, i64 {start}")

    def look(self, view: View) -> None:
        """A tensor on the memory of another."""
        frame, made, source = self.frame, view.made, view.source
        start = self.address(source)
        step = frame.index(view.offset * made.dtype.itemsize)
        self.addresses[made.name] = frame.w.let(f"getelementptr i8, ptr {start}, i64 {step}")
        match self.places[source]:
            case Planned():
                self.places[made.name] = Planned(made)
            case Look(root, _, offset):
                self.places[made.name] = Look(root, made, offset + view.offset)
            case _:
                self.places[made.name] = Look(source, made, view.offset)

    def free(self, name: str) -> None:
        """Let go of a value."""
        frame = self.frame
        self.addresses.pop(name, None)
        match self.places.pop(name, None):
            case Object(slot):
                frame.drop_object(slot)
            case Handle(slot):
                frame.drop_handle(slot)
            case Planned() | Look() if name in self.views:
                frame.drop_handle(self.views.pop(name))
            case Parts(parts):
                for part in parts:
                    if isinstance(part, Handle):
                        frame.drop_handle(part.slot)

    # --- forms ---

    def address(self, name: str) -> str:
        """Where a tensor's data begin; checked to lie as kernels expect it."""
        if name not in self.addresses:
            self.addresses[name] = self._checked_address(name)
        return self.addresses[name]

    def _checked_address(self, name: str) -> str:
        frame = self.frame
        data = frame.room(1)
        getter = f"torch_get_{'mutable' if name in self.written else 'const'}_data_ptr"
        if name in self.layouts and self._is_simple(name):
            self._check_object(name, data)
        elif name in self.layouts:
            stride, dtype = self.layouts[name]
            code = frame.call(
                "i32",
                "stator_data",
                f"ptr {self.handle(name)}",
                f"i32 {scalar_type(dtype)}",
                f"i64 {len(stride)}",
                f"ptr {frame.array(stride)}",
                f"i32 {int(name in self.written)}",
                f"ptr {data}",
            )
            with frame.unless(frame.is_zero(code)):
                self._lay_out(name)
                frame.call("i32", getter, f"ptr {self.handle(name)}", f"ptr {data}")
        else:
            frame.call("i32", getter, f"ptr {self.handle(name)}", f"ptr {data}")
        address = frame.w.let(f"load ptr, ptr {data}")
        if self.device.type != "cuda" or name not in self.layouts or name in self.loose:
            return address
        number = frame.w.let(f"ptrtoint ptr {address} to i64")
        low = frame.w.let(f"and i64 {number}, {ALIGNED - 1}")
        with frame.unless(frame.w.let(f"icmp eq i64 {low}, 0")):
            self._lay_out(name)
            frame.call("i32", getter, f"ptr {self.handle(name)}", f"ptr {data}")
        return frame.w.let(f"load ptr, ptr {data}")

    def _is_simple(self, name: str) -> bool:
        """Whether the check is one call of the prelude's: most are, and it is short."""
        known = all(step.constant is not None for step in self.layouts[name][0])
        return known and isinstance(self.places[name], Object)

    def _check_object(self, name: str, data: str) -> None:
        frame, place = self.frame, self.places[name]
        assert isinstance(place, Object), "it was looked at before"
        stride, dtype = self.layouts[name]
        fix = refuse if name in self.written & self.callers else as_planned
        mends = (fix, self._known(stride), dtype)
        code = frame.call(
            "i32",
            "stator_object_data",
            f"ptr {frame.object_at(place.slot)}",
            f"i32 {scalar_type(dtype)}",
            f"i64 {len(stride)}",
            f"ptr {frame.array(stride)}",
            f"i32 {int(name in self.written)}",
            f"ptr {data}",
            "ptr %table",
            f"ptr {frame.numbers([frame.in_table(value) for value in mends])}",
            "ptr %thread",
        )
        frame.require(frame.is_zero(code))

    def _known(self, sizes: Sequence[Index]) -> tuple[int, ...]:
        """Sizes as a tuple, the same one for the same sizes."""
        key = tuple(size.constant for size in sizes if size.constant is not None)
        return self.tuples.setdefault(key, key)

    def _lay_out(self, name: str) -> None:
        """Put a copy of a tensor that lies otherwise in its place; what is written to may not."""
        frame = self.frame
        stride, dtype = self.layouts[name]
        fix = refuse if name in self.written & self.callers else as_planned
        given = [self.object(name), self.sizes(stride), self.fixed(dtype)]
        fresh = self.call_object(self.fixed(fix), given)
        match self.places[name]:
            case Object(slot):
                frame.drop_object(slot)
                frame.w.line(f"store ptr {fresh}, ptr {frame.object_at(slot)}")
            case Handle(slot):
                frame.drop_handle(slot)
                self.to_handle(fresh, slot)
            case other:
                raise AssertionError(f"{name}, a {type(other).__name__}, lies as it was planned")

    def to_handle(self, fresh: str, slot: int) -> None:
        """Move a tensor into a slot, from its Python object, of which we have a reference."""
        frame = self.frame
        frame.call(
            "i32",
            "stator_to_handle",
            f"ptr {fresh}",
            f"i64 {TENSOR_IN_OBJECT}",
            f"ptr {frame.python(None)}",
            f"ptr {frame.handle_at(slot)}",
        )
        frame.call("void", "Py_DecRef", f"ptr {fresh}")

    def handle(self, name: str) -> str:
        """A tensor as torch's C functions take it."""
        frame = self.frame
        match self.places[name]:
            case Object(slot):
                held = frame.load_object(slot)
                return frame.w.let(f"getelementptr i8, ptr {held}, i64 {TENSOR_IN_OBJECT}")
            case Handle(slot):
                return frame.load_handle(slot)
            case Borrowed(row, number):
                place = frame.w.let(f"getelementptr ptr, ptr {row}, i64 {number}")
                return frame.w.let(f"load ptr, ptr {place}")
            case Planned() | Look():
                return frame.load_handle(self.view(name))
            case other:
                raise AssertionError(f"{name}, a {type(other).__name__}, is no tensor")

    def view(self, name: str) -> int:
        """The slot of a handle on another's memory; made when it is first asked for."""
        if name not in self.views:
            slot = self.frame.new_handle()
            match self.places[name]:
                case Planned(made):
                    code = self._on_arena(made, slot)
                case Look(root, made, offset):
                    code = self._on_tensor(root, made, offset, slot)
                case other:
                    raise AssertionError(f"a {type(other).__name__} has a handle of its own")
            self.frame.require_memory(self.frame.is_zero(code))
            self.views[name] = slot
        return self.views[name]

    def _on_tensor(self, root: str, made: Allocation, offset: Index, slot: int) -> str:
        frame = self.frame
        return frame.call(
            "i32",
            "aoti_torch__reinterpret_tensor",
            f"ptr {self.handle(root)}",
            f"i64 {len(made.size)}",
            f"ptr {frame.array(made.size)}",
            f"ptr {frame.array(made.stride)}",
            f"i64 {frame.index(offset)}",
            f"ptr {frame.handle_at(slot)}",
        )

    def _on_arena(self, made: Allocation, slot: int) -> str:
        frame = self.frame
        if self.device.type != "cpu":
            return self._in_pool(made, slot)
        return frame.call(
            "i32",
            "torch_from_blob",
            f"ptr {self.addresses[made.name]}",
            f"i64 {len(made.size)}",
            f"ptr {frame.array(made.size)}",
            f"ptr {frame.array(made.stride)}",
            "i64 0",
            f"i32 {scalar_type(made.dtype)}",
            "i32 0",  # a CPU
            "i32 -1",
            f"ptr {frame.handle_at(slot)}",
            "i32 0",  # strided
            "ptr null",
            "i64 0",
            "ptr null",  # nobody deletes it
            "ptr null",
        )

    def _in_pool(self, made: Allocation, slot: int) -> str:
        """A look at the tensor that the arena is: it stays as long as somebody looks."""
        frame, w = self.frame, self.frame.w
        start, place = (
            w.let(f"ptrtoint ptr {pointer} to i64")
            for pointer in ("%arena", self.addresses[made.name])
        )
        return frame.call(
            "i32",
            "aoti_torch__alloc_from_pool",
            f"ptr {self.handle(ARENA)}",
            f"i64 {w.let(f'sub i64 {place}, {start}')}",
            f"i32 {scalar_type(made.dtype)}",
            f"i64 {len(made.size)}",
            f"ptr {frame.array(made.size)}",
            f"ptr {frame.array(made.stride)}",
            f"ptr {frame.handle_at(slot)}",
        )

    def object(self, name: str) -> Reference:
        """A value as a Python object."""
        frame = self.frame
        match self.places[name]:
            case Object(slot):
                return Reference(frame.load_object(slot))
            case Numeric(value):
                return self.number(value)
            case Handle() | Planned() | Look() | Borrowed():
                return self.wrapped(self.handle(name))
            case Parts(parts):
                return self.row_of([self._part(part) for part in parts], "Tuple")

    def _part(self, part: Handle | Numeric) -> Reference:
        if isinstance(part, Numeric):
            return self.number(part.value)
        return self.wrapped(self.frame.load_handle(part.slot))

    # --- Python objects ---

    def fixed(self, value: Any) -> Reference:
        """An object of the table."""
        return Reference(self.frame.python(value))

    def number(self, value: str) -> Reference:
        """An integer."""
        return Reference(self.frame.call("ptr", "PyLong_FromLongLong", f"i64 {value}"), True)

    def wrapped(self, handle: str) -> Reference:
        """The Python object of a tensor; None for one that is undefined."""
        return Reference(self.frame.call("ptr", WRAP_TENSOR, f"ptr {handle}"), True)

    def sizes(self, sizes: Sequence[Index]) -> Reference:
        """Sizes as a tuple."""
        if all(size.constant is not None for size in sizes):
            return self.fixed(self._known(sizes))
        return self.row_of([self.number(self.frame.index(size)) for size in sizes], "Tuple")

    def row_of(self, items: Sequence[Reference], kind: str) -> Reference:
        """A new list or tuple."""
        frame = self.frame
        row = frame.call("ptr", f"Py{kind}_New", f"i64 {len(items)}")
        for number, item in enumerate(items):
            if not item.owned:
                frame.call("void", "Py_IncRef", f"ptr {item.value}")
            at = f"i64 {number}"
            frame.call("i32", f"Py{kind}_SetItem", f"ptr {row}", at, f"ptr {item.value}")
        return Reference(row, True)

    def call_object(
        self, function: Reference, given: Sequence[Reference], names: tuple[str, ...] = ()
    ) -> str:
        """Call a Python object, the last arguments by `names`; its result, or the way out."""
        frame = self.frame
        arguments = frame.room(len(given))
        for number, argument in enumerate(given):
            frame.put("ptr", argument.value, arguments, number)
        result = frame.call(
            "ptr",
            "PyObject_Vectorcall",
            f"ptr {function.value}",
            f"ptr {arguments}",
            f"i64 {len(given) - len(names)}",
            f"ptr {frame.python(names) if names else 'null'}",
        )
        for argument in given:
            self.release(argument)
        frame.require(frame.is_set(result))
        return result

    def release(self, reference: Reference) -> None:
        """Let go of a reference, if it is one of our own."""
        if reference.owned:
            self.frame.call("void", "Py_DecRef", f"ptr {reference.value}")
