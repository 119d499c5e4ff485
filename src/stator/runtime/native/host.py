"""A plan as one function in LLVM: kernels and C functions are called directly, the rest through
Python.

run(self, arguments)   self holds the table of Python objects; arguments is a list, emptied at once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from stator.loops.index import Index
from stator.loops.ir import Kernel
from stator.lower.sizes import Shown
from stator.runtime.memory import Memory, allocations
from stator.runtime.native.calls import Calls
from stator.runtime.native.frame import Frame
from stator.runtime.native.image import (
    LIST_ITEMS,
    LIST_LENGTH,
    TABLE_IN_BYTES,
    TABLE_IN_SELF,
)
from stator.runtime.native.values import Numeric, Object, Planned, Reference, Values
from stator.runtime.native.watch import Watch
from stator.runtime.plan import (
    Allocation,
    Call,
    Constant,
    Free,
    Launch,
    Number,
    Plan,
    Require,
    Step,
    Together,
    View,
)
from stator.runtime.python import WORTH_THREADS
from stator.runtime.rare import (
    refuse_arguments,
    refuse_device,
    refuse_launch,
    require_later,
    truth,
)

ENTER: Final = "aoti_torch_create_cuda_guard"
LEAVE: Final = "aoti_torch_delete_cuda_guard"
LONG: Final = 1 << 20  # points times operations, during which other threads should run


@dataclass(frozen=True, slots=True)
class HostProgram:
    """LLVM text, and the Python objects that it refers to by their place in a table."""

    text: str
    table: tuple[Any, ...]


def write_host(
    plan: Plan,
    memory: Memory,
    kernels: Mapping[Kernel, str],
    annotate: Any,
    watch: Watch | None = None,
) -> HostProgram:
    """The host program of a plan.

    `kernels` are the symbols of its kernels; `annotate(error, step)` is called when one fails;
    `watch` is written around every step.
    """
    return Host(plan, memory, kernels, annotate, watch).write()


@dataclass(slots=True)
class Host:
    """Writes the host program of a plan."""

    plan: Plan
    memory: Memory
    kernels: Mapping[Kernel, str]
    annotate: Any
    watch: Watch | None = None
    frame: Frame = field(default_factory=Frame)
    guard: str = ""  # where the guard is that keeps a GPU the current device
    values: Values = field(init=False)
    calls: Calls = field(init=False)

    def __post_init__(self) -> None:
        written = frozenset(name for step in self.plan.steps for name in step.writes)
        self.values = Values(self.frame, self.plan.layouts, written, self.plan.callers)
        self.values.device, self.values.loose = self.plan.device, self.plan.loose
        self.calls = Calls(self.frame, self.values)

    def write(self) -> HostProgram:
        frame = self.frame
        for name in self.plan.inputs:
            self.values.places[name] = Object(frame.new_object())
        self.write_steps()
        result = self._outputs()
        if self.plan.on_gpu:
            self.leave_device()
        elif self.memory.offsets:
            frame.call("void", "stator_arena_give", "ptr %arena")
        frame.w.line(f"ret ptr {result.value}")
        self._way_out()
        text = self._assembled()  # it refers to one object more
        return HostProgram(text, tuple(frame.table))

    def write_steps(self) -> None:
        """The sizes, the arena, and all steps."""
        if self.plan.on_gpu:
            self.enter_device()
        self.read_sizes()
        if self.memory.offsets:
            self._open_arena()
        launches = any(isinstance(step, Launch | Together) for step in self.plan.steps)
        if launches and not self.plan.on_gpu:
            self._count_threads()
        if self.watch is not None:
            self.watch.enter(self.frame)
        for number, step in enumerate(self.plan.steps):
            self.frame.step = number
            if self.watch is None:
                self._step(step)
            else:
                self.watch.around(self.frame, number, partial(self._step, step))

    # --- entry ---

    def read_sizes(self) -> None:
        """Read every size that varies from the inputs."""
        for symbol, shown in self.plan.sizes.items():
            self.read_size(symbol, shown)

    def read_size(self, symbol: str, shown: Shown) -> None:
        """Read a size from an input, under the symbol's name."""
        frame = self.frame
        if shown.source is None:
            frame.w.line(f"%{symbol} = add i64 0, {shown.start}")
            return
        if shown.dim is None:
            number = self.values.object(shown.source).value
            value = frame.call("i64", "PyLong_AsLongLong", f"ptr {number}")
        else:
            room = frame.room(1)
            tensor = self.values.handle(shown.source)
            frame.call(
                "i32", "aoti_torch_get_size", f"ptr {tensor}", f"i64 {shown.dim}", f"ptr {room}"
            )
            value = frame.w.let(f"load i64, ptr {room}")
        above = frame.w.let(f"sub i64 {value}, {shown.start}")
        frame.w.line(f"%{symbol} = sdiv i64 {above}, {shown.step}")

    def enter_device(self) -> None:
        """Make the plan's device the current one, as calls and launches expect it."""
        frame, device = self.frame, self.plan.device
        self.guard = frame.room(1)
        frame.w.line(f"store ptr null, ptr {self.guard}")
        code = frame.call("i32", ENTER, f"i32 {device.index or 0}", f"ptr {self.guard}")
        with frame.unless(frame.is_zero(code)):
            self._refuse(refuse_device, self.values.fixed(device))

    def leave_device(self) -> None:
        """Make the device current that was."""
        held = self.frame.w.let(f"load ptr, ptr {self.guard}")
        self.frame.call("i32", LEAVE, f"ptr {held}")

    def _refuse(self, raises: Any, *given: Reference) -> None:
        """Call a Python function that raises."""
        self.values.call_object(self.values.fixed(raises), given)

    def _open_arena(self) -> None:
        frame = self.frame
        if self.plan.on_gpu:
            self.values.open_arena(self.memory.arena)
            return
        size = frame.index(self.memory.arena)
        frame.w.line(f"%arena = call ptr @stator_arena_take(i64 {size})")
        frame.declared["stator_arena_take"] = "declare ptr @stator_arena_take(i64) nonlazybind"
        frame.require_memory(frame.is_set("%arena"))
        frame.w.line("store ptr %arena, ptr %taken")

    def _count_threads(self) -> None:
        frame = self.frame
        room = frame.room(1)
        frame.call("i32", "torch_get_num_threads", f"ptr {room}")
        frame.w.line(f"%threads = load i32, ptr {room}")

    # --- steps ---

    def _step(self, step: Step) -> None:
        for made in allocations(step):
            self._make(made)
        match step:
            case Launch():
                self._launch(step)
            case Together():
                self._launch_together(step)
            case Call():
                self.calls.run(step)
            case View():
                self.values.look(step)
            case Constant():
                self.values.take(step.name, step.value)
            case Number():
                self.values.places[step.name] = Numeric(self.frame.index(step.index))
            case Require():
                self.require(step)
            case Free():
                self._free(step.names)

    def _make(self, made: Allocation) -> None:
        offset = self.memory.offsets.get(made.name)
        if offset is not None:
            self.values.plan(made, offset)
        else:
            self.values.make(made)

    def _free(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.values.free(name)

    def _launch(self, step: Launch) -> None:
        given = [
            *(f"ptr {self.values.address(name)}" for name in step.arguments),
            *(f"i64 {self.frame.index(size)}" for size in step.sizes),
            f"i32 {self.threads(step.work)}",
        ]
        self._unlock_for(step.work)
        self.call_kernel(step.nameless, given)

    def _launch_together(self, step: Together) -> None:
        """A table of addresses and sizes, one line for each launch."""
        frame = self.frame
        cells = []
        for launch in step.launches:
            cells += [("ptr", self.values.address(name)) for name in launch.arguments]
            cells += [("i64", frame.index(size)) for size in launch.sizes]
        room = frame.room(len(cells))
        for number, (kind, value) in enumerate(cells):
            frame.put(kind, value, room, number)
        threads = self.threads(step.work)
        self._unlock_for(step.work)
        count = len(step.launches)
        self.call_kernel(step.nameless, [f"ptr {room}", f"i64 {count}", f"i32 {threads}"])

    def call_kernel(self, kernel: Kernel, given: list[str]) -> None:
        """Call a kernel by its symbol."""
        frame = self.frame
        if not self.plan.on_gpu:
            frame.call("void", self.kernels[kernel], *given)
            return
        code = frame.call("i32", self.kernels[kernel], *given)
        with frame.unless(frame.is_zero(code)):
            step = self.plan.steps[frame.step]
            name = step.kernel.name if isinstance(step, Launch) else self.kernels[kernel]
            answer = self.values.number(frame.w.let(f"sext i32 {code} to i64"))
            self._refuse(refuse_launch, self.values.fixed(name), answer)

    def threads(self, work: Index) -> str:
        """How many threads a kernel runs on: below the break-even one."""
        if self.plan.on_gpu:
            return "1"
        if work.constant is not None:
            return "%threads" if work.constant >= WORTH_THREADS else "1"
        w = self.frame.w
        worth = w.let(f"icmp sge i64 {self.frame.index(work)}, {WORTH_THREADS}")
        return w.let(f"select i1 {worth}, i32 %threads, i32 1")

    def _unlock_for(self, work: Index) -> None:
        # A launch waits where the device is far behind, maybe for another thread's launch.
        if self.plan.on_gpu or work.constant is None or work.constant >= LONG:
            self.frame.unlock()

    def require(self, step: Require) -> None:
        """Raise an error if a flag is set."""
        frame = self.frame
        if self.plan.on_gpu:
            frame.lock()
            given = [self.values.object(step.flag), self.values.fixed(step.message)]
            done = self.values.call_object(self.values.fixed(require_later), given)
            self.values.release(Reference(done, True))
            return
        place = self.values.places[step.flag]
        if isinstance(place, Planned) and place.made.dtype is torch.int32:
            broken = frame.w.let(f"load i32, ptr {self.values.address(step.flag)}")
        else:
            broken = self._truth(step.flag)
        with frame.unless(frame.is_zero(broken)):
            error, message = frame.python(step.error), frame.python(step.message)
            frame.call("void", "PyErr_SetObject", f"ptr {error}", f"ptr {message}")
            frame.require("false")

    def _truth(self, flag: str) -> str:
        """Whether a tensor is not zero, by Python."""
        frame = self.frame
        frame.lock()
        verdict = self.values.call_object(self.values.fixed(truth), [self.values.object(flag)])
        broken = frame.call("i32", "PyObject_IsTrue", f"ptr {verdict}")
        self.values.release(Reference(verdict, True))
        return broken

    # --- exits ---

    def _outputs(self) -> Reference:
        """A tuple of what the plan returns; the program holds nothing then."""
        self.frame.lock()
        items = [
            self.values.object(value.name)
            if isinstance(value, fx.Node)
            else self.values.fixed(value)
            for value in self.plan.outputs
        ]
        result = self.values.row_of(items, "Tuple")
        for name in list(self.values.places):  # outputs, and what they are views of
            self.values.free(name)
        return result

    def _way_out(self) -> None:
        """Where every failure ends: with an exception, and nothing held."""
        frame = self.frame
        w = frame.w
        w.open_block("no_memory")
        frame.call("void", "stator_lock", "ptr %thread")
        frame.call("ptr", "PyErr_NoMemory")
        w.line("br label %fail")
        w.open_block("fail")
        frame.call("void", "stator_lock", "ptr %thread")
        if self.watch is not None:
            self.watch.fail(frame)
        number = w.let("load i64, ptr %failed")
        note = frame.python(self.annotate)
        frame.call("void", "stator_note", f"ptr {note}", f"i64 {number}")
        frame.call(
            "void",
            "stator_drop_all",
            "ptr %objects",
            f"i64 {frame.objects}",
            "ptr %handles",
            f"i64 {frame.handles}",
        )
        # The CPU's arena, or the guard of a GPU, whose arena was one of the handles.
        held = w.let(f"load ptr, ptr {self.guard or '%taken'}")
        w.line(f"br i1 {frame.is_set(held)}, label %give_back, label %gone")
        w.open_block("give_back")
        if self.plan.on_gpu:
            self.leave_device()
        else:
            frame.call("void", "stator_arena_give", f"ptr {held}")
        w.line("br label %gone")
        w.open_block("gone")
        w.line("ret ptr null")

    def _assembled(self) -> str:
        frame = self.frame
        count, refuse = len(self.plan.inputs), frame.in_table(refuse_arguments)
        head = [
            "define ptr @run(ptr %self, ptr %arguments) {",
            "entry:",
            f"  %table_at = getelementptr i8, ptr %self, i64 {TABLE_IN_SELF}",
            "  %table_bytes = load ptr, ptr %table_at",
            f"  %table = getelementptr i8, ptr %table_bytes, i64 {TABLE_IN_BYTES}",
            "  %thread = alloca ptr",
            "  %taken = alloca ptr",
            "  %failed = alloca i64",
            f"  %objects = alloca [{max(frame.objects, 1)} x ptr]",
            f"  %handles = alloca [{max(frame.handles, 1)} x ptr]",
            *frame.rooms,
            "  store ptr null, ptr %thread",
            "  store ptr null, ptr %taken",
            "  store i64 0, ptr %failed",
            f"  call void @llvm.memset.p0.i64(ptr %objects, i8 0, i64 {8 * frame.objects}, i1 0)",
            f"  call void @llvm.memset.p0.i64(ptr %handles, i8 0, i64 {8 * frame.handles}, i1 0)",
            "  ; the list's references become ours: it is left empty",
            f"  %length_at = getelementptr i8, ptr %arguments, i64 {LIST_LENGTH}",
            f"  %items_at = getelementptr i8, ptr %arguments, i64 {LIST_ITEMS}",
            "  %items = load ptr, ptr %items_at",
            "  %length = load i64, ptr %length_at",
            f"  %fits = icmp eq i64 %length, {count}",
            "  br i1 %fits, label %start, label %misfit",
            "misfit:",
            f"  %refuse_at = getelementptr ptr, ptr %table, i64 {refuse}",
            "  %refuse = load ptr, ptr %refuse_at",
            "  %never = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs("
            "ptr %refuse, ptr %arguments, ptr null)",
            "  ret ptr null",
            "start:",
            f"  call void @llvm.memcpy.p0.p0.i64(ptr %objects, ptr %items, i64 {8 * count}, i1 0)",
            "  store i64 0, ptr %length_at",
        ]
        constants = [
            f"{name} = private unnamed_addr constant {text}"
            for text, name in frame.constants.items()
        ]
        intrinsics = [
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
            "declare ptr @PyObject_CallFunctionObjArgs(ptr, ...) nonlazybind",
        ]
        declared = [frame.declared[name] for name in sorted(frame.declared)]
        return "\n".join([*constants, *intrinsics, *declared, *head, *frame.w.lines, "}", ""])
