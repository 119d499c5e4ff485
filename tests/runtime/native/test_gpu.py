"""Host programs for a GPU: the CPU plays it, with functions of ours for those of CUDA."""

from __future__ import annotations

import ctypes
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, fx

from stator.codegen.llvm.jit import compile_text
from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import Code, load_object
from stator.core.torch_types import Boxed
from stator.loops.index import Index
from stator.runtime.memory import plan_memory
from stator.runtime.native import values
from stator.runtime.native.dispatch import Dispatch, why_not_dispatched
from stator.runtime.native.executor import compile_native, kernel_symbols, native_program
from stator.runtime.native.frame import Frame
from stator.runtime.native.image import bind_host, why_not_native
from stator.runtime.native.prelude import load_prelude
from stator.runtime.plan import Allocation, Call, Free, Plan, Require, View
from stator.torch_api import torch_symbol
from tests.runtime.launches import launch, plan

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason="needs host programs")

aten = torch.ops.aten
GPU: Final = torch.device("cuda", 3)
POINTER, WORD, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


def node(name: str) -> fx.Node:
    """A value of a plan, by its name."""
    found: fx.Node = fx.Graph().placeholder(name)
    return found


def c_function(name: str, *kinds: Any) -> Any:
    """One of torch's C functions."""
    return ctypes.CFUNCTYPE(NUMBER, *kinds)(torch_symbol(name) or 0)


# It is called while an exception is set, which Python could not be.
LEAVE: Final = """
@left = global i64 0
define i32 @leave(ptr %guard) {
  %before = load i64, ptr @left
  %after = add i64 %before, 1
  store i64 %after, ptr @left
  ret i32 0
}
"""


@dataclass
class Cuda:
    """The CPU as a GPU."""

    codes: dict[str, int] = field(default_factory=dict)  # what fails, and how
    seen: list[Any] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)  # devices that tensors were made on
    kept: list[Any] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    machine: Code = field(
        default_factory=lambda: load_object(compile_text(LEAVE), library_function)
    )

    def offer(self, name: str, function: Callable[..., int], *kinds: Any) -> None:
        """Let programs find a function."""

        def counted(*given: Any) -> int:
            self.seen.append(name)
            return self.codes[name] if name in self.codes else function(*given)

        self.kept.append(ctypes.CFUNCTYPE(NUMBER, *kinds)(counted))
        self.known[name] = ctypes.cast(self.kept[-1], POINTER).value or 0

    def load(self, made: Plan) -> Boxed:
        """A plan for the GPU as machine code."""
        self.offer("aoti_torch_create_cuda_guard", self._enter, NUMBER, POINTER)
        self.known["aoti_torch_delete_cuda_guard"] = self.machine.address("leave")
        kinds = (WORD, POINTER, POINTER, NUMBER, NUMBER, NUMBER, POINTER, POINTER)
        self.offer("stator_new_on", self._make, *kinds)
        for kernel, symbol in kernel_symbols(made).items():
            self._offer_kernel(symbol, made.entries[kernel].function)
        made = replace(made, device=GPU)
        image = compile_native(made, plan_memory(made))
        known = {**load_prelude(image.prelude), **self.known}
        return bind_host(image, known, "test", (self, made.entries))

    def _enter(self, number: int, guard: int) -> int:
        assert number == GPU.index
        POINTER.from_address(guard).value = 77
        return 0

    def _make(self, *given: Any) -> int:
        *layout, kind, index, slot, data = given
        self.made.append((kind, index))
        kinds = (WORD, POINTER, POINTER, NUMBER, NUMBER, NUMBER, POINTER)
        assert c_function("aoti_torch_empty_strided", *kinds)(*layout, 0, 0, slot) == 0
        handle = POINTER.from_address(slot).value
        return int(c_function("torch_get_mutable_data_ptr", POINTER, POINTER)(handle, data))

    def _offer_kernel(self, symbol: str, function: Any) -> None:
        def run(*given: Any) -> int:
            assert given[-1] == 1, "threads of the CPU are not asked for"
            function(*given)
            return 0

        *kinds, _ = function.argtypes
        self.offer(symbol, run, *kinds, NUMBER)


def entered(cuda: Cuda) -> tuple[int, int]:
    """How often the device was made the current one, and how often another was again."""
    left = WORD.from_address(cuda.machine.address("left")).value
    return cuda.seen.count("aoti_torch_create_cuda_guard"), left


@contextmanager
def nothing_left(*given: Tensor) -> Iterator[None]:
    """Require that nobody holds the tensors afterwards but who did before."""
    before = [sys.getrefcount(tensor) for tensor in given]
    yield
    gc.collect()
    assert [sys.getrefcount(tensor) for tensor in given] == before


SMALL: Final = (10, 10)
LARGE: Final = (1 << 9, 1 << 10)  # a tensor of its own


@pytest.mark.parametrize("size", [SMALL, LARGE, (0, 4)], ids=str)
def test_kernels_run_on_buffers_of_the_device(size: tuple[int, int]) -> None:
    steps = (
        launch("a", "x", size=size),
        launch("b", "a", "x", size=size),
        Free(("a",)),
        launch("c", "b", "x", size=size),
        Free(("b", "x")),
    )
    cuda = Cuda()
    run = cuda.load(plan("x", *steps, outputs=(node("c"),)))
    x = torch.randn(size)

    for count in (1, 2):
        with nothing_left(x):
            (result,) = run([x])
            assert torch.equal(result, x)
        assert entered(cuda) == (count, count)
    # One arena and the result, or three tensors; each on the device.
    assert set(cuda.made) == {(1, GPU.index)}
    assert len(cuda.made) == 2 * (3 if size is LARGE else 2)


def test_the_arena_is_seen_by_calls() -> None:
    """Buffers are looked at as tensors, from their beginnings and from within."""
    part = Allocation(
        "part", (Index.of(4), Index.of(10)), (Index.of(10), Index.of(1)), torch.float32
    )
    steps = (
        launch("a", "x", size=SMALL),
        launch("b", "x", "x", size=SMALL),
        View("b", part, Index.of(20), Call("part", aten.slice.Tensor, (node("b"), 0, 2, 6), {})),
        Call("c", aten.mm.default, (node("part"), node("a")), {}),
        Free(("a", "part", "b")),
    )
    made = plan("x", *steps, outputs=(node("c"),))
    assert set(plan_memory(made).offsets) == {"a", "b"}
    cuda = Cuda()
    x = torch.randn(SMALL)

    (result,) = cuda.load(made)([x])

    assert torch.equal(result, (2 * x)[2:6] @ -x)
    assert len(cuda.made) == 1


def test_a_c_function_writes_into_the_arena() -> None:
    out = Allocation("c", (Index.of(10), Index.of(10)), (Index.of(10), Index.of(1)), torch.float32)
    product = Call("c", aten.mm.default, (node("x"), node("x")), {}, "aoti_torch_cpu_mm_out", out)
    made = plan("x", product, launch("d", "c", size=SMALL), Free(("c",)), outputs=(node("d"),))
    x = torch.randn(SMALL)

    (result,) = Cuda().load(made)([x])

    torch.testing.assert_close(result, -(x @ x))


def test_launches_are_checked_and_ask_for_no_threads() -> None:
    made = replace(plan("x", launch("y", "x", size=LARGE), outputs=(node("y"),)), device=GPU)

    text = native_program(made, plan_memory(made)).text

    assert "declare i32 @kernel_0(ptr, ptr, i64, i32)" in text
    assert "torch_get_num_threads" not in text
    assert "stator_unlock" in text  # a launch may wait


# --- failures ---


def test_a_launch_that_fails_raises() -> None:
    cuda = Cuda({"kernel_0": 700})
    made = plan("x", launch("a", "x"), launch("b", "a"), Free(("a",)), outputs=(node("b"),))
    run = cuda.load(made)
    x = torch.randn(100)

    for count in (1, 2):
        with (
            nothing_left(x),
            pytest.raises(RuntimeError, match="negate could not be launched: CUDA error 700"),
        ):
            run([x])
        assert entered(cuda) == (count, count)
    cuda.codes.clear()
    assert torch.equal(run([x])[0], x)


def test_a_device_that_cannot_be_used_raises() -> None:
    cuda = Cuda({"aoti_torch_create_cuda_guard": 1})
    run = cuda.load(plan("x", launch("a", "x"), outputs=(node("a"),)))
    x = torch.randn(100)

    # What was not entered is not left.
    with nothing_left(x), pytest.raises(RuntimeError, match="cuda:3, for which the graph"):
        run([x])
    assert entered(cuda) == (1, 0)


def test_where_there_is_no_memory_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def full(*given: Any) -> None:
        asked.append(given)
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(values, "empty_strided", full)
    cuda = Cuda({"stator_new_on": 1})
    run = cuda.load(plan("x", launch("a", "x"), outputs=(node("a"),)))
    x = torch.randn(100)

    with nothing_left(x), pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        run([x])
    assert asked == [((100,), (1,), torch.float32, GPU)]
    assert entered(cuda) == (1, 1)


def test_a_flag_is_not_waited_for() -> None:
    """It goes to an assertion on the device: the CPU's own raises at once."""
    cuda = Cuda()
    run = cuda.load(plan("flag", Require("flag", IndexError, "out of range")))

    assert run([torch.tensor(0, dtype=torch.int32)]) == ()
    with pytest.raises(RuntimeError, match="out of range"):
        run([torch.tensor(1, dtype=torch.int32)])
    assert entered(cuda) == (2, 2)


# --- results that are numbers, tensors that are none ---


def counted(x: Tensor, other: Tensor) -> tuple[Tensor, int, Tensor]:
    return x + 1, x.numel(), x + 2


@pytest.fixture(scope="module")
def numbers() -> Iterator[Any]:
    """An operator with a number among its results."""
    library = torch.library.Library("stator_test_gpu", "FRAGMENT")
    library.define("counted(Tensor x, Tensor other) -> (Tensor, SymInt, Tensor)")
    library.impl("counted", counted, "CPU")
    yield torch.ops.stator_test_gpu.counted.default
    library._destroy()


def from_c(cuda: Cuda) -> None:
    """A C function for the operator: numbers, and copies of the handle of its first argument."""

    def function(x: int, other: int, first: int, number: int, last: int) -> int:
        defined = ctypes.c_bool(True)
        c_function("aoti_torch_is_defined", POINTER, POINTER)(other, ctypes.addressof(defined))
        cuda.seen.append(("defined", defined.value))
        copy = c_function("aoti_torch_new_tensor_handle", POINTER, POINTER)
        WORD.from_address(number).value = 1 << 40
        return int(copy(x, first) or copy(x, last))

    cuda.offer("fake_counted", function, *[POINTER] * 5)


def counting(op: Any, *given: Any) -> Plan:
    steps = (
        Call("some", op, given, {}, symbol="fake_counted", parts=3),
        Call("one", operator.getitem, (node("some"), 0), {}),
        Call("many", operator.getitem, (node("some"), 1), {}),
        Call("two", operator.getitem, (node("some"), 2), {}),
    )
    return Plan(("x",), steps, (node("many"), node("one"), node("some"), node("two")))


def test_a_c_function_may_return_numbers_and_take_a_tensor_that_is_none(numbers: Any) -> None:
    cuda = Cuda()
    from_c(cuda)
    run = cuda.load(counting(numbers, node("x"), None))
    x = torch.randn(5)

    with nothing_left(x):
        many, one, whole, two = run([x])
        assert many == whole[1] == 1 << 40
        assert torch.equal(one, x)
        assert torch.equal(whole[0], two)
        del many, one, whole, two
    assert ("defined", False) in cuda.seen


def test_what_a_c_function_did_not_do_python_does(numbers: Any) -> None:
    cuda = Cuda({"fake_counted": 1})
    from_c(cuda)
    x = torch.randn(5)

    made = counting(numbers, node("x"), node("x"))

    many, one, _, two = cuda.load(made)([x])

    assert many == 5
    assert torch.equal(one, x + 1)
    assert torch.equal(two, x + 2)


# --- what torch must have ---


def test_what_is_missing_for_a_gpu_is_named() -> None:
    reason = why_not_native("cuda")

    if torch.version.cuda:
        assert reason is None
    else:
        assert reason is not None
        assert "aoti_torch_create_cuda_guard" in reason


@pytest.mark.parametrize(
    ("device", "word"),
    [("cpu", 0xFFFFFFFF), ("cuda:0", 1 << 32), ("cuda:3", 1 << 32 | 3), ("cuda", 0x1FFFFFFFF)],
)
def test_the_dispatcher_is_told_a_device_by_kind_and_number(device: str, word: int) -> None:
    frame = Frame()
    dispatch = Dispatch(frame, values.Values(frame, {}, frozenset(), frozenset()), str)
    call = Call("y", aten.zeros.default, ([2],), {"device": torch.device(device)})
    assert why_not_dispatched(call) is None

    dispatch.call(call)

    assert any(f"store i64 {word}," in line for line in frame.w.lines)
