"""What a host program is written with: slots, constants, the lock, the way out.

A program keeps what it owns in two arrays on its stack, `objects` for references to Python objects
and `handles` for torch's tensor handles.  A slot is emptied when its value dies; a failed call lets
go of whatever the arrays still hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stator.codegen.llvm.indices import Indices
from stator.loops.index import Index
from stator.runtime.native.image import Operator


@dataclass(slots=True)
class Frame(Indices):
    """The function that is being written."""

    rooms: list[str] = field(default_factory=list)  # stack memory, reserved at the entry
    constants: dict[str, str] = field(default_factory=dict)  # text of a constant -> its name
    declared: dict[str, str] = field(default_factory=dict)  # functions, with their declarations
    table: list[Any] = field(default_factory=list)  # Python objects that the program refers to
    known: dict[Any, int] = field(default_factory=dict)  # where they are
    objects: int = 0  # slots
    handles: int = 0
    has_lock: bool = True
    step: int = 0  # the one that is being written

    # --- constants ---

    def constant(self, text: str) -> str:
        """Read-only memory with this content."""
        name = self.constants.get(text)
        if name is None:
            name = self.constants[text] = f"@constant_{len(self.constants)}"
        return name

    def text(self, value: str) -> str:
        """A string that ends with a zero."""
        raw = value.encode() + b"\0"
        escaped = "".join("\\" + f"{byte:02X}" for byte in raw)
        return self.constant(f'[{len(raw)} x i8] c"{escaped}"')

    def numbers(self, values: Sequence[int]) -> str:
        """Known numbers in a row, in memory."""
        row = ", ".join(f"i64 {value}" for value in values)
        return self.constant(f"[{len(values)} x i64] [{row}]") if values else "null"

    def array(self, values: Sequence[Index]) -> str:
        """Numbers in a row, in memory."""
        count = len(values)
        known = [value.constant for value in values if value.constant is not None]
        if len(known) == count:
            return self.numbers(known)
        room = self.room(count)
        for number, value in enumerate(values):
            self.put("i64", self.index(value), room, number)
        return room

    def python(self, value: Any) -> str:
        """A Python object of the table."""
        place = self.w.let(f"getelementptr ptr, ptr %table, i64 {self.in_table(value)}")
        return self.w.let(f"load ptr, ptr {place}")

    def in_table(self, value: Any) -> int:
        """The place of a Python object in the table."""
        key = value if isinstance(value, Operator) else id(value)
        number = self.known.setdefault(key, len(self.table))
        if number == len(self.table):
            self.table.append(value)
        return number

    # --- memory of the call ---

    def room(self, words: int) -> str:
        """Words on the stack, for the whole call."""
        name = f"%room{len(self.rooms)}"
        self.rooms.append(f"  {name} = alloca [{max(words, 1)} x i64], align 8")
        return name

    def put(self, kind: str, value: str, room: str, number: int) -> None:
        """Store into one of a row of words."""
        place = self.w.let(f"getelementptr i64, ptr {room}, i64 {number}")
        self.w.line(f"store {kind} {value}, ptr {place}")

    def new_object(self) -> int:
        """A slot for a Python object."""
        self.objects += 1
        return self.objects - 1

    def new_handle(self) -> int:
        """A slot for a tensor handle."""
        self.handles += 1
        return self.handles - 1

    def object_at(self, slot: int) -> str:
        """Address of a slot."""
        return self.w.let(f"getelementptr ptr, ptr %objects, i64 {slot}")

    def handle_at(self, slot: int) -> str:
        """Address of a slot."""
        return self.w.let(f"getelementptr ptr, ptr %handles, i64 {slot}")

    def load_object(self, slot: int) -> str:
        """What a slot holds."""
        return self.w.let(f"load ptr, ptr {self.object_at(slot)}")

    def load_handle(self, slot: int) -> str:
        """What a slot holds."""
        return self.w.let(f"load ptr, ptr {self.handle_at(slot)}")

    def keep_object(self, value: str) -> int:
        """A new reference into a slot of its own."""
        slot = self.new_object()
        self.w.line(f"store ptr {value}, ptr {self.object_at(slot)}")
        return slot

    def drop_object(self, slot: int) -> None:
        """Let go of a reference."""
        self.lock()
        self.call("void", "stator_drop_object", f"ptr {self.object_at(slot)}")

    def drop_handle(self, slot: int) -> None:
        """Let go of a tensor."""
        self.call("void", "stator_drop_handle", f"ptr {self.handle_at(slot)}")

    # --- calls ---

    def call(self, result: str, name: str, *given: str) -> str:
        """Call a function by its symbol; the result, if it has one."""
        kinds = ", ".join(argument.rpartition(" ")[0] for argument in given)
        self.declared[name] = f"declare {result} @{name}({kinds}) nonlazybind"
        text = f"call {result} @{name}({', '.join(given)})"
        if result == "void":
            self.w.line(text)
            return ""
        return self.w.let(text)

    def lock(self) -> None:
        """Hold Python's lock from here on."""
        if not self.has_lock:
            self.call("void", "stator_lock", "ptr %thread")
            self.has_lock = True

    def unlock(self) -> None:
        """Let other threads run Python from here on."""
        if self.has_lock:
            self.call("void", "stator_unlock", "ptr %thread")
            self.has_lock = False

    @contextmanager
    def unless(self, good: str) -> Iterator[None]:
        """Code for the rare case that `good` is false, with Python's lock held."""
        rare, on = self.w.name("rare"), self.w.name("on")
        before = self.has_lock
        self.w.line(f"br i1 {good}, label %{on}, label %{rare}")
        self.w.open_block(rare)
        self.lock()
        yield
        if not before:
            self.unlock()
        self.has_lock = before
        self.w.line(f"br label %{on}")
        self.w.open_block(on)

    def require(self, good: str) -> None:
        """Give up, with the exception that is set, unless `good`."""
        bad, on = self.w.name("bad"), self.w.name("on")
        self.w.line(f"br i1 {good}, label %{on}, label %{bad}")
        self.w.open_block(bad)
        self.fail()
        self.w.open_block(on)

    def require_memory(self, good: str) -> None:
        """Give up, because there is no memory left, unless `good`."""
        bad, on = self.w.name("bad"), self.w.name("on")
        self.w.line(f"br i1 {good}, label %{on}, label %{bad}")
        self.w.open_block(bad)
        self.w.line(f"store i64 {self.step}, ptr %failed")
        self.w.line("br label %no_memory")
        self.w.open_block(on)

    def fail(self) -> None:
        """Give up, with the exception that is set."""
        self.w.line(f"store i64 {self.step}, ptr %failed")
        self.w.line("br label %fail")

    def is_set(self, pointer: str) -> str:
        """Whether it is not null."""
        return self.w.let(f"icmp ne ptr {pointer}, null")

    def is_zero(self, code: str) -> str:
        """Whether one of torch's C functions succeeded."""
        return self.w.let(f"icmp eq i32 {code}, 0")
