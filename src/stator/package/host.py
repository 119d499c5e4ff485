"""A plan as a function of a library, without Python: tensors are handles, errors are texts.

i32 run(constants, inputs, outputs, device)   rows of handles, a GPU's number; 0, or 1 and a message
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from stator.core.dtypes import scalar_type
from stator.errors import Unsupported
from stator.loops.index import Index
from stator.loops.ir import Kernel
from stator.lower.sizes import Shown
from stator.ops.draws import draw_seed
from stator.ops.promises import as_promised
from stator.ops.writes import written
from stator.package.conditions import Condition
from stator.runtime.memory import Memory
from stator.runtime.native.calls import Calls
from stator.runtime.native.dispatch import why_not_dispatched
from stator.runtime.native.frame import Frame
from stator.runtime.native.host import ENTER, Host
from stator.runtime.native.values import (
    DEVICE_TYPES,
    Borrowed,
    Handle,
    Look,
    Parts,
    Planned,
    Slot,
    Values,
)
from stator.runtime.plan import ALIGNED, Allocation, Call, Launch, Plan, Require

_SIZES: Final = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)
_DECLARED: Final = re.compile(r"^(?:declare|define)[^@\n]*@([\w.]+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Input:
    """What a program was built for: one of its inputs."""

    name: str
    dtype: torch.dtype
    size: tuple[Index, ...]  # one that varies is a symbol, or follows from some
    ranges: tuple[tuple[int, int], ...]  # of every dimension, both ends within
    device: str = "cpu"  # the kind that it is on


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs of a graph: which are the caller's, and which are constants."""

    inputs: Mapping[str, Input]  # by the names of placeholders, in order
    constants: Mapping[str, int]  # placeholders that are constants: their numbers
    added: Mapping[int, int]  # constants of the graph itself, by id: their numbers
    count: int  # of all constants
    conditions: Sequence[Condition] = ()  # on sizes of the inputs


def made_once(plan: Plan) -> list[str]:
    """Inputs of a plan that its own calls make: once for every set of constants."""
    made = [step.name for step in plan.steps if isinstance(step, Call)]
    return [name for name in made if name in plan.inputs]


def write_library_host(
    plan: Plan, memory: Memory, kernels: Mapping[Kernel, int], signature: Signature, runtime: str
) -> str:
    """LLVM text of a plan; `kernels` are places in a table, `runtime` is what stands before it."""
    return _LibraryHost(plan, memory, {}, None, places=kernels, signature=signature).text(runtime)


def launcher_symbol(number: int) -> str:
    """What the launcher of a GPU's kernel is called."""
    return f"stator_launch_{number}"


@dataclass(slots=True)
class _LibraryFrame(Frame):
    """A function without Python, and so without its lock."""

    def lock(self) -> None:
        """There is none."""

    def unlock(self) -> None:
        """There is none."""

    def give_up(self) -> None:
        """Fail with the message that was written."""
        self.w.line("br label %said")

    def insist(self, code: str) -> None:
        """Fail with the message that was written, unless a code is 0."""
        bad, on = self.w.name("bad"), self.w.name("on")
        self.w.line(f"br i1 {self.is_zero(code)}, label %{on}, label %{bad}")
        self.w.open_block(bad)
        self.give_up()
        self.w.open_block(on)


@dataclass(slots=True)
class _LibraryValues(Values):
    """Values that are handles, all of them."""

    constants: Mapping[int, int] = field(default_factory=dict)  # a tensor's id -> its number
    told: Mapping[str, str] = field(default_factory=dict)  # inputs as messages call them

    def without_memory(self, code: str, made: Allocation, slot: int, data: str) -> None:
        """Where a tensor could not be made, the run ends."""
        self.frame.require_memory(self.frame.is_zero(code))

    def device_word(self, device: torch.device) -> str:
        """A GPU is the one that the library was loaded on, whichever it was built on."""
        if device.type == "cpu":
            return super(_LibraryValues, self).device_word(device)
        number = self.frame.w.let("zext i32 %device to i64")
        return self.frame.w.let(f"or i64 {DEVICE_TYPES[device.type] << 32}, {number}")

    def on_device(self) -> list[str]:
        """The device as torch's C functions take it."""
        return [f"i32 {DEVICE_TYPES[self.device.type]}", "i32 %device"]

    def take(self, name: str, value: Any) -> None:
        """A constant of the graph; what takes a function is refused when it is called."""
        if isinstance(value, torch.Tensor):
            self.places[name] = Borrowed("%constants", self.constants[id(value)])

    def _checked_address(self, name: str) -> str:
        frame, place = self.frame, self.places[name]
        if isinstance(place, Borrowed) and place.row == "%constants":
            at = frame.w.let(f"getelementptr ptr, ptr %data, i64 {place.number}")
            return self._aligned(name, at)
        data = frame.room(1)
        handle, written = self.handle(name), name in self.written
        if name not in self.layouts:
            getter = f"torch_get_{'mutable' if written else 'const'}_data_ptr"
            frame.call("i32", getter, f"ptr {handle}", f"ptr {data}")
            return frame.w.let(f"load ptr, ptr {data}")
        stride, dtype = self.layouts[name]
        layout = [f"i64 {len(stride)}", f"ptr {frame.array(stride)}"]
        kind = f"i32 {scalar_type(dtype)}"
        flag = f"i32 {int(written)}"
        code = frame.call("i32", "stator_data", f"ptr {handle}", kind, *layout, flag, f"ptr {data}")
        with frame.unless(frame.is_zero(code)):
            if name in self.written & self.callers:
                self.refuse(
                    f"{self.told.get(name, name)}: the program writes to it, and it lies otherwise "
                    "than the example; give one with its strides"
                )
            else:
                self._lay_out_at(name, data)
        return self._aligned(name, data)

    def _aligned(self, name: str, data: str) -> str:
        """The address at `data`, of a copy where kernels of a GPU expect it to begin elsewhere."""
        frame = self.frame
        address = frame.w.let(f"load ptr, ptr {data}")
        if self.device.type == "cpu" or name not in self.layouts or name in self.loose:
            return address
        number = frame.w.let(f"ptrtoint ptr {address} to i64")
        low = frame.w.let(f"and i64 {number}, {ALIGNED - 1}")
        own = frame.room(1)
        frame.put("ptr", address, own, 0)
        with frame.unless(frame.w.let(f"icmp eq i64 {low}, 0")):
            self._lay_out_at(name, own)
        return frame.w.let(f"load ptr, ptr {own}")

    def _lay_out_at(self, name: str, data: str) -> None:
        """Put a copy that lies as kernels expect it in a tensor's place, its address to `data`."""
        frame, (stride, dtype) = self.frame, self.layouts[name]
        at, slot = self._where(name)
        given = [f"ptr {at}", f"ptr {slot}", f"i64 {len(stride)}", f"ptr {frame.array(stride)}"]
        given += [f"i32 {scalar_type(dtype)}", f"ptr {data}"]
        frame.require(frame.is_zero(frame.call("i32", "stator_lay_out", *given)))

    def _where(self, name: str) -> tuple[str, str]:
        """Where a tensor's handle is, and a slot that owns what takes its place."""
        frame = self.frame
        match self.places[name]:
            case Handle(slot):
                return frame.handle_at(slot), frame.handle_at(slot)
            case Borrowed("%constants", number):  # of all runs: this one has its own copy
                handle = self.handle(name)
                at = frame.room(1)
                frame.put("ptr", handle, at, 0)
                return at, frame.handle_at(frame.new_handle())
            case Borrowed(row, number):
                at = frame.w.let(f"getelementptr ptr, ptr {row}, i64 {number}")
                return at, frame.handle_at(frame.new_handle())
            case other:
                raise AssertionError(f"{name}, a {type(other).__name__}, lies as it was planned")

    def refuse(self, message: str) -> None:
        """Fail with a message of our own."""
        self.frame.call("i32", "say", f"ptr {self.frame.text(message)}")
        self.frame.w.line("br label %said")
        self.frame.w.open_block(self.frame.w.name("never"))


@dataclass(slots=True)
class _LibraryCalls(Calls):
    """Calls of torch's C functions, and through its dispatcher."""

    once: dict[str, int] = field(default_factory=dict)  # calls to be made once: words of the set

    def run(self, call: Call) -> None:
        """The call; its result becomes a value."""
        places = self.values.places
        if call.name in self.once:
            self._run_once(call, self.once[call.name])
        elif call.target is operator.getitem and isinstance(places.get(call.args[0].name), Parts):
            source = places[call.args[0].name]
            assert isinstance(source, Parts), "it was looked at"
            places[call.name] = Handle(self.part(source, call.args[1]))
        elif call.target is as_promised:
            self._hold_to_promise(call)
        elif call.symbol is not None and self.is_passable(call):
            self.shim(call, call.symbol)
        else:
            self._dispatched(call)

    def _hold_to_promise(self, call: Call) -> None:
        """Another handle on a tensor, which has the sizes that were foretold."""
        frame, (value, sizes, operator_name) = self.frame, call.args
        handle = self.values.handle(value.name)
        known = frame.numbers([-1 if size is None else size for size in sizes])
        told = [f"ptr {handle}", f"ptr {frame.text(operator_name)}"]
        told += [f"i64 {len(sizes)}", f"ptr {known}"]
        _insist(frame, frame.call("i32", "stator_check_promise", *told))
        slot = frame.new_handle()
        own = [f"ptr {handle}", f"ptr {frame.handle_at(slot)}"]
        frame.require_memory(frame.is_zero(frame.call("i32", "aoti_torch_new_tensor_handle", *own)))
        self.values.places[call.name] = Handle(slot)

    def check(self, code: str, call: Call, slots: Sequence[Slot]) -> None:
        """What fails ends the run."""
        self.frame.require(self.frame.is_zero(code))

    def _run_once(self, call: Call, word: int) -> None:
        """The call, unless its result is in the set of constants; of two threads, one puts it."""
        frame, w = self.frame, self.frame.w
        at = w.let(f"getelementptr ptr, ptr %constants, i64 {word}")
        held = w.let(f"load atomic ptr, ptr {at} acquire, align 8")
        with frame.unless(frame.is_set(held)):
            self._dispatched(call)
            made = self.values.places[call.name]
            assert isinstance(made, Handle), "it returns one tensor"
            handle = frame.load_handle(made.slot)
            pair = w.let(f"cmpxchg ptr {at}, ptr null, ptr {handle} acq_rel acquire")
            is_first = w.let(f"extractvalue {{ ptr, i1 }} {pair}, 1")
            left = w.let(f"select i1 {is_first}, ptr null, ptr {handle}")
            w.line(f"store ptr {left}, ptr {frame.handle_at(made.slot)}")
        self.values.places[call.name] = Borrowed("%constants", word)

    def _dispatched(self, call: Call) -> None:
        call = _in_torchs_words(call)
        reason, called = why_not_dispatched(call), call.called
        if call.target is written:
            reason, called = "it writes to its arguments", str(call.args[0])
        elif call.target in _SIZES:
            reason = "it asks for a size that follows from values of tensors"
        if reason is not None:
            where = f", {call.line}" if call.line else ""
            raise Unsupported(
                "package",
                f"{called}{where}: {reason}",
                hint="a library calls it without Python; compile the model without it, or replace "
                "it by other operators",
            )
        self.dispatch(call)


def _in_torchs_words(call: Call) -> Call:
    """One of our functions as the operator that it calls."""
    if call.target is not draw_seed:
        return call
    bounds = (-(1 << 31), 1 << 31, [2])
    device = next(iter((*call.args, *call.kwargs.values())), None) or torch.device("cpu")
    words = {"dtype": torch.int32, "device": device}
    return replace(call, target=torch.ops.aten.randint.low, args=bounds, kwargs=words)


@dataclass(slots=True)
class _LibraryHost(Host):
    places: Mapping[Kernel, int] = field(default_factory=dict)
    signature: Signature = field(default_factory=lambda: Signature({}, {}, {}, 0))

    def __post_init__(self) -> None:
        written = frozenset(name for step in self.plan.steps for name in step.writes)
        self.frame = _LibraryFrame()
        callers = frozenset(self.plan.inputs)
        self.values = _LibraryValues(self.frame, self.plan.layouts, written, callers)
        self.values.constants = self.signature.added
        inputs = enumerate(self.signature.inputs.items())
        self.values.told = {name: f"input {i}, {given.name}" for i, (name, given) in inputs}
        self.values.device, self.values.loose = self.plan.device, self.plan.loose
        self.guard = "%guard" if self.plan.on_gpu else ""
        words = enumerate(made_once(self.plan), 2 * self.signature.count)
        self.calls = _LibraryCalls(self.frame, self.values, {name: word for word, name in words})

    def text(self, runtime: str) -> str:
        """The function, without what `runtime` declares already."""
        for number, name in enumerate(self.signature.inputs):
            self.values.places[name] = Borrowed("%given", number)
        for name, number in self.signature.constants.items():
            self.values.places[name] = Borrowed("%constants", number)
        self._check_inputs()
        self.write_steps()
        self._give_outputs()
        if self.plan.on_gpu:
            self.leave_device()
        elif self.memory.offsets:
            self.frame.call("void", "stator_arena_give", "ptr %arena")
        self.frame.w.line("ret i32 0")
        self._way_out()
        known = set(_DECLARED.findall(runtime))
        return self._put_together(known)

    # --- entry ---

    def enter_device(self) -> None:
        """Make the device that the library was loaded on the current one."""
        frame = self.frame
        code = frame.call("i32", ENTER, "i32 %device", f"ptr {self.guard}")
        with frame.unless(frame.is_zero(code)):
            self._refuse_with("the GPU that it was loaded on cannot be used")

    def _refuse_with(self, message: str) -> None:
        assert isinstance(self.values, _LibraryValues), "it was made so"
        self.values.refuse(message)

    def _check_inputs(self) -> None:
        frame = self.frame
        for number, (name, given) in enumerate(self.signature.inputs.items()):
            sizes = [-1 if size.constant is None else size.constant for size in given.size]
            it = [f"ptr {self.values.handle(name)}", f"i64 {number}"]
            it.append(f"ptr {frame.text(given.name)}")
            kind = f"i32 {DEVICE_TYPES[given.device]}"
            _insist(frame, frame.call("i32", "stator_check_place", *it, kind, "i32 %device"))
            code = frame.call(
                "i32",
                "stator_check_input",
                *it,
                f"i32 {scalar_type(given.dtype)}",
                f"i64 {len(sizes)}",
                f"ptr {frame.numbers(sizes)}",
            )
            _insist(frame, code)

    def read_size(self, symbol: str, shown: Shown) -> None:
        """Read a size from an input."""
        if shown.source is not None and shown.dim is None:
            raise Unsupported(
                "package",
                f"input {shown.source} is a number that varies",
                hint="a library takes tensors; give the number as a tensor, or a fixed one",
            )
        super(_LibraryHost, self).read_size(symbol, shown)

    def read_sizes(self) -> None:
        """Read sizes that vary from the inputs, and check all that follows from them."""
        super(_LibraryHost, self).read_sizes()
        for number, (name, given) in enumerate(self.signature.inputs.items()):
            for dim, (size, span) in enumerate(zip(given.size, given.ranges, strict=True)):
                if size.constant is None:
                    self._check_size(number, name, dim, size, span)
        for one in self.signature.conditions:
            left, right = self.frame.index(one.left), self.frame.index(one.right)
            with self.frame.unless(self.frame.w.let(f"icmp {one.word} i64 {left}, {right}")):
                self._refuse_with(
                    f"input sizes: the program was exported for those with {one.text}"
                )

    def _check_size(
        self, number: int, name: str, dim: int, size: Index, span: tuple[int, int]
    ) -> None:
        """A size is what follows from the symbols, and within its bounds."""
        frame = self.frame
        expected = frame.index(size)
        fixed = [f"ptr {self.values.handle(name)}", f"i64 {number}"]
        fixed += [f"ptr {frame.text(self.signature.inputs[name].name)}", f"i64 {dim}"]
        bounds = [f"i64 {span[0]}", f"i64 {span[1]}"]
        _insist(frame, frame.call("i32", "stator_check_size", *fixed, *bounds))
        both = [f"i64 {expected}", f"i64 {expected}"]
        _insist(frame, frame.call("i32", "stator_check_size", *fixed, *both))

    # --- steps ---

    def call_kernel(self, kernel: Kernel, given: list[str]) -> None:
        """Call a kernel of the level that was chosen, or the launcher of a GPU's."""
        frame = self.frame
        if self.plan.on_gpu:
            code = frame.call("i32", launcher_symbol(self.places[kernel]), *given)
            with frame.unless(frame.is_zero(code)):
                step = self.plan.steps[frame.step]
                name = step.kernel.name if isinstance(step, Launch) else "a kernel"
                told = [f"ptr {frame.text(name)}", f"i32 {code}"]
                frame.call("void", "stator_launch_failed", *told)
                _give_up(frame)
            return
        table = frame.w.let("load ptr, ptr @kernels")
        at = frame.w.let(f"getelementptr ptr, ptr {table}, i64 {self.places[kernel]}")
        function = frame.w.let(f"load ptr, ptr {at}")
        frame.w.line(f"call void {function}({', '.join(given)})")

    def threads(self, work: Index) -> str:
        """On how many threads a kernel runs; on which device, if it is a GPU's."""
        return "%device" if self.plan.on_gpu else super(_LibraryHost, self).threads(work)

    def require(self, step: Require) -> None:
        """Fail with the step's message if a flag is set."""
        if self.plan.on_gpu:
            self._require_later(step)
            return
        frame, place = self.frame, self.values.places[step.flag]
        if isinstance(place, Planned) and place.made.dtype is torch.int32:
            broken = frame.w.let(f"load i32, ptr {self.values.address(step.flag)}")
        else:
            room = frame.room(1)
            handle = self.values.handle(step.flag)
            read = frame.call("i32", "aoti_torch_item_bool", f"ptr {handle}", f"ptr {room}")
            frame.require(frame.is_zero(read))
            flag = frame.w.let(f"load i8, ptr {room}")
            broken = frame.w.let(f"zext i8 {flag} to i32")
        with frame.unless(frame.is_zero(broken)):
            self._refuse_with(step.message)

    def _require_later(self, step: Require) -> None:
        """Fail where a flag is set, when the device comes to it: nobody waits for that."""
        aten, graph = torch.ops.aten, fx.Graph()
        holds, done = (f"{step.flag}_{word}_{self.frame.step}" for word in ("holds", "asserted"))
        flag, good = graph.placeholder(step.flag), graph.placeholder(holds)
        self.calls.dispatch(Call(holds, aten.logical_not.default, (flag,), {}))
        given = (good, step.message)
        self.calls.dispatch(Call(done, aten._assert_async.msg, given, {}))
        self.values.free(holds)

    # --- exits ---

    def _give_outputs(self) -> None:
        """Handles for the caller; what only the program holds goes."""
        frame = self.frame
        given: set[int] = set()
        for number, value in enumerate(self.plan.outputs):
            assert isinstance(value, fx.Node), "constants are no outputs of a library"
            place = self.values.places[value.name]
            slot = place.slot if isinstance(place, Handle) else None
            if isinstance(place, Planned | Look):
                slot = self.values.view(value.name)
            at = frame.w.let(f"getelementptr ptr, ptr %outputs, i64 {number}")
            if slot is None or slot in given:
                handle = self.values.handle(value.name)
                frame.call("i32", "aoti_torch_new_tensor_handle", f"ptr {handle}", f"ptr {at}")
                continue
            given.add(slot)
            frame.w.line(f"store ptr {frame.load_handle(slot)}, ptr {at}")
        for slot in given:
            frame.w.line(f"store ptr null, ptr {frame.handle_at(slot)}")
        frame.call("void", "stator_drop_handles", "ptr %handles", f"i64 {frame.handles}")

    def _way_out(self) -> None:
        """Where every failure ends: with a message, and nothing held."""
        frame = self.frame
        w = frame.w
        w.open_block("no_memory")
        frame.call("i32", "say", f"ptr {frame.text('there is no memory left')}")
        w.line("br label %said")
        w.open_block("fail")
        number = w.let("load i64, ptr %failed")
        at = w.let(f"getelementptr ptr, ptr @step_names, i64 {number}")
        name = w.let(f"load ptr, ptr {at}")
        frame.call("void", "stator_step_failed", f"ptr {name}")
        w.line("br label %said")
        w.open_block("said")
        frame.call("void", "stator_drop_handles", "ptr %handles", f"i64 {frame.handles}")
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
        w.line("ret i32 1")

    def _put_together(self, known: set[str]) -> str:
        frame = self.frame
        names = [self._step_name(step) for step in self.plan.steps] or [frame.text("")]
        count, constants = len(self.signature.inputs), self.signature.count
        row = ", ".join(f"ptr {name}" for name in names)
        head = [
            f"@step_names = internal constant [{len(names)} x ptr] [{row}]",
            "define internal i32 @run(ptr %constants, ptr %inputs, ptr %outputs, i32 %device) {",
            "entry:",
            "  %taken = alloca ptr",
            "  %guard = alloca ptr",
            "  %failed = alloca i64",
            f"  %handles = alloca [{max(frame.handles, 1)} x ptr]",
            f"  %given = alloca [{max(count, 1)} x ptr]",
            *frame.rooms,
            "  store ptr null, ptr %taken",
            "  store ptr null, ptr %guard",
            "  store i64 0, ptr %failed",
            f"  %data = getelementptr ptr, ptr %constants, i64 {constants}",
            f"  call void @llvm.memset.p0.i64(ptr %handles, i8 0, i64 {8 * frame.handles}, i1 0)",
            f"  call void @llvm.memcpy.p0.p0.i64(ptr %given, ptr %inputs, i64 {8 * count}, i1 0)",
        ]
        texts = [
            f"{name} = private unnamed_addr constant {text}"
            for text, name in frame.constants.items()
        ]
        declared = [
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
            *(line for name, line in sorted(frame.declared.items()) if name not in known),
        ]
        return "\n".join([*texts, *declared, *head, *frame.w.lines, "}", ""])

    def _step_name(self, step: Any) -> str:
        """What a failure of it is told by: the name of the user's file, in whichever folder."""
        if not isinstance(step, Call):
            return self.frame.text(type(step).__name__)
        return self.frame.text(step.called + (f", {Path(step.line).name}" if step.line else ""))


def _give_up(frame: Frame) -> None:
    assert isinstance(frame, _LibraryFrame), "it was made so"
    frame.give_up()
    frame.w.open_block(frame.w.name("never"))


def _insist(frame: Frame, code: str) -> None:
    assert isinstance(frame, _LibraryFrame), "it was made so"
    frame.insist(code)
