"""Host programs that tell how long their steps take: to torch's profiler, or to a table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stator.runtime.native.frame import Frame
from stator.torch_api import torch_symbol

BEGIN: Final = "aoti_record_function_start"
END: Final = "aoti_record_function_end"
MONOTONIC: Final = 1  # the clock's number
SECOND: Final = 1_000_000_000
CELLS: Final = 3  # of a step: how often it ran, nanoseconds in all, and the fewest


class Watch(Protocol):
    """What is written around the steps of a program."""

    def enter(self, frame: Frame) -> None:
        """Before the first step."""

    def around(self, frame: Frame, number: int, write: Callable[[], None]) -> None:
        """Write a step, and what stands around it."""

    def fail(self, frame: Frame) -> None:
        """Where a program gives up."""


@dataclass(slots=True)
class Watches:
    """Several at once, the first one outermost."""

    all: tuple[Watch, ...]

    def enter(self, frame: Frame) -> None:
        """Before the first step."""
        for one in self.all:
            one.enter(frame)

    def around(self, frame: Frame, number: int, write: Callable[[], None]) -> None:
        """Write a step, and what stands around it."""
        for one in reversed(self.all):
            write = _within(one, frame, number, write)
        write()

    def fail(self, frame: Frame) -> None:
        """Where a program gives up."""
        for one in self.all:
            one.fail(frame)


def _within(
    watch: Watch, frame: Frame, number: int, write: Callable[[], None]
) -> Callable[[], None]:
    return lambda: watch.around(frame, number, write)


@dataclass(slots=True)
class Ranges:
    """Ranges of torch's profiler, named after kernels and the user's lines."""

    labels: Mapping[int, str]
    room: str = ""  # where the range is that is open

    @staticmethod
    def why_not() -> str | None:
        """None if torch exports what opens and closes a range."""
        missing = [name for name in (BEGIN, END) if torch_symbol(name) is None]
        return f"torch does not export {', '.join(missing)}" if missing else None

    def enter(self, frame: Frame) -> None:
        """No range is open."""
        self.room = frame.room(1)
        frame.w.line(f"store ptr null, ptr {self.room}")

    def around(self, frame: Frame, number: int, write: Callable[[], None]) -> None:
        """A range around every step that has a name."""
        label = self.labels.get(number)
        if label is None:
            write()
            return
        none = ("ptr null", "ptr null", "i64 0")  # neither keywords nor inputs
        frame.call("i32", BEGIN, f"ptr {frame.text(label)}", *none, f"ptr {self.room}")
        write()
        self._close(frame)

    def fail(self, frame: Frame) -> None:
        """Close the range of the step that failed."""
        still, on = frame.w.name("open"), frame.w.name("closed")
        opened = frame.is_set(frame.w.let(f"load ptr, ptr {self.room}"))
        frame.w.line(f"br i1 {opened}, label %{still}, label %{on}")
        frame.w.open_block(still)
        self._close(frame)
        frame.w.line(f"br label %{on}")
        frame.w.open_block(on)

    def _close(self, frame: Frame) -> None:
        guard = frame.w.let(f"load ptr, ptr {self.room}")
        frame.call("i32", END, f"ptr {guard}")
        frame.w.line(f"store ptr null, ptr {self.room}")


@dataclass(slots=True)
class Times:
    """How often each step of a plan ran, and how long it took; in nanoseconds."""

    cells: Any  # of ctypes

    @staticmethod
    def of(steps: int) -> Times:
        """Room for so many steps."""
        return Times((ctypes.c_int64 * (CELLS * max(steps, 1)))())

    def step(self, number: int) -> tuple[int, int, int]:
        """Of one step: how often it ran, nanoseconds in all, and the fewest of one run."""
        count, total, least = self.cells[CELLS * number : CELLS * (number + 1)]
        return count, total, least


@dataclass(slots=True)
class Clock:
    """Adds up in a table how long steps take."""

    times: Times
    labels: Mapping[int, str]
    room: str = field(default="")

    def enter(self, frame: Frame) -> None:
        """Room for the time."""
        self.room = frame.room(2)
        frame.in_table(self.times)  # the program holds on to it

    def around(self, frame: Frame, number: int, write: Callable[[], None]) -> None:
        """The time before, the time behind, and the sums."""
        if number not in self.labels:
            write()
            return
        begin = self._now(frame)
        write()
        took = frame.w.let(f"sub i64 {self._now(frame)}, {begin}")
        place = ctypes.addressof(self.times.cells) + 8 * CELLS * number
        count, total, least = (f"inttoptr (i64 {place + 8 * n} to ptr)" for n in range(CELLS))
        w = frame.w
        before = w.let(f"load i64, ptr {count}")
        w.line(f"store i64 {w.let(f'add i64 {before}, 1')}, ptr {count}")
        sum_ = w.let(f"add i64 {w.let(f'load i64, ptr {total}')}, {took}")
        w.line(f"store i64 {sum_}, ptr {total}")
        known = w.let(f"load i64, ptr {least}")
        fewer = w.let(f"icmp slt i64 {took}, {known}")
        first = w.let(f"icmp eq i64 {before}, 0")
        taken = w.let(f"or i1 {fewer}, {first}")
        w.line(f"store i64 {w.let(f'select i1 {taken}, i64 {took}, i64 {known}')}, ptr {least}")

    def fail(self, frame: Frame) -> None:
        """A step that failed is not counted."""

    def _now(self, frame: Frame) -> str:
        frame.call("i32", "clock_gettime", f"i32 {MONOTONIC}", f"ptr {self.room}")
        w = frame.w
        behind = w.let(f"getelementptr i64, ptr {self.room}, i64 1")
        seconds = w.let(f"mul i64 {w.let(f'load i64, ptr {self.room}')}, {SECOND}")
        return w.let(f"add i64 {seconds}, {w.let(f'load i64, ptr {behind}')}")
