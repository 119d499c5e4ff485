"""Launchers hand a kernel its grid, arguments and stream; CUDA is played by functions of ours."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from stator.codegen.llvm.objects import can_load
from stator.codegen.triton.driver import STEP, Asked, error_text, kernel_function, launch_error
from stator.codegen.triton.launch import INVALID_CONTEXT, Launcher, load
from stator.loops.index import Index, Symbol

pytestmark = pytest.mark.skipif(not can_load(), reason="launchers are for Linux on x86-64")

GLOBAL, RELAXED = 0, 2  # of CUstreamCaptureMode
CONTEXT, MODULE, FUNCTION, STREAM = 0xC000, 0xD000, 0xF000, 0x5000
N, M = Symbol("n000"), Symbol("n001")
CUBIN: Final = b"\x7fELF" + bytes(range(256)) + b'"\\'
KINDS: Final = {"ptr": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
# Types of the functions that launchers call.
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int32
TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (NUMBER,),
    "cuDevicePrimaryCtxRetain": (POINTER, NUMBER),
    "cuCtxSetCurrent": (POINTER,),
    "cuThreadExchangeStreamCaptureMode": (POINTER,),
    "cuModuleLoadData": (POINTER, POINTER),
    "cuModuleGetFunction": (POINTER, POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (POINTER, NUMBER, NUMBER),
    "cuLaunchKernel": (POINTER, *[NUMBER] * 7, POINTER, POINTER, POINTER),
    "aoti_torch_get_current_cuda_stream": (NUMBER, POINTER),
}
# What they put where their first, or their last argument says.
RESULTS: Final = {
    "cuDevicePrimaryCtxRetain": (0, CONTEXT),
    "cuModuleLoadData": (0, MODULE),
    "cuModuleGetFunction": (0, FUNCTION),
    "aoti_torch_get_current_cuda_stream": (1, STREAM),
}


@dataclass
class Cuda:
    """A driver that answers as it was told, and notes what it was asked for."""

    passed: tuple[str, ...]  # parameters of the kernel that it launches
    answers: dict[str, list[int]] = field(default_factory=dict)  # the first ones; then 0
    asked: list[str] = field(default_factory=list)
    given: dict[str, list[Any]] = field(default_factory=dict)  # the last time
    parameters: list[int] = field(default_factory=list)
    image: bytes = b""
    mode: int = GLOBAL  # of the thread, towards streams that are recorded
    modes: dict[str, int] = field(default_factory=dict)  # in which each was last called
    kept: list[Any] = field(default_factory=list)

    def resolve(self, name: str) -> int:
        """Where one of its functions is."""

        def function(*given: Any) -> int:
            self.asked.append(name)
            self.given[name] = list(given)
            self.modes[name] = self.mode
            if name == "cuThreadExchangeStreamCaptureMode" and not self.answers.get(name):
                exchanged = ctypes.c_int32.from_address(given[0])
                exchanged.value, self.mode = self.mode, exchanged.value
            if name in RESULTS:
                place, value = RESULTS[name]
                ctypes.c_uint64.from_address(given[place]).value = value
            if name == "cuModuleLoadData":
                self.image = ctypes.string_at(given[1], len(CUBIN))
            if name == "cuLaunchKernel":
                row = (ctypes.c_uint64 * len(self.passed)).from_address(given[9])
                pairs = zip(self.passed, row, strict=True)
                self.parameters = [KINDS[kind].from_address(at).value for kind, at in pairs]
            waiting = self.answers.get(name)
            return waiting.pop(0) if waiting else 0

        made = ctypes.CFUNCTYPE(NUMBER, *TYPES[name])(function)
        self.kept.append(made)
        address = ctypes.cast(made, POINTER).value
        assert address is not None
        return address


def launcher(**changes: Any) -> Launcher:
    """out, x, n, m: a kernel over n*m points, 128 a block."""
    blocks = (Index.of(N) * M + 127) // 128
    one = Index.of(1)
    made = Launcher(
        name="kernel_3",
        function="kernel",
        cubin=CUBIN,
        passed=("ptr", "ptr", "i64", "i32"),
        symbols=(N, M),
        grid=(blocks, one, one),
        threads=256,
        shared=1024,
        device=2,
    )
    return replace(made, **changes)


def called(made: Launcher, *arguments: int, **answers: list[int]) -> Cuda:
    """Launch once, with 1 thread on the CPU."""
    taken = tuple(kind for kind in made.passed if kind)
    cuda = Cuda((*taken, *["ptr"] * made.scratch), answers)
    module = load([made], cuda.resolve)
    module.entries[made.name](*arguments, 1)
    return cuda


def test_a_kernel_is_loaded_and_launched() -> None:
    cuda = called(launcher(), 0x1234567890, 0x40, 100, 30)

    function, *grid_and_block, shared, stream, _, extra = cuda.given["cuLaunchKernel"]
    assert grid_and_block == [24, 1, 1, 256, 1, 1]
    assert (function, shared, stream, extra) == (FUNCTION, 1024, STREAM, None)
    assert cuda.parameters == [0x1234567890, 0x40, 100, 30, 0, 0]
    assert cuda.given["aoti_torch_get_current_cuda_stream"][0] == 2


def test_the_cubin_is_loaded_whole_into_the_context_of_the_device() -> None:
    cuda = called(launcher(), 1, 2, 100, 30)

    assert cuda.image == CUBIN
    assert cuda.given["cuDevicePrimaryCtxRetain"][1] == 2
    assert cuda.given["cuCtxSetCurrent"] == [CONTEXT]
    assert cuda.given["cuModuleGetFunction"][1:] == [MODULE, b"kernel"]


def test_a_kernel_is_loaded_once() -> None:
    made = launcher()
    cuda = Cuda(("ptr", "ptr", "i64", "i32"))
    module = load([made], cuda.resolve)
    entry = module.entries[made.name]

    entry(1, 2, 3, 4, 1)
    before = len(cuda.asked)
    entry(5, 6, 7, 8, 1)

    assert cuda.asked[before:] == ["aoti_torch_get_current_cuda_stream", "cuLaunchKernel"]
    assert cuda.parameters == [5, 6, 7, 8]


def test_a_kernel_can_be_loaded_while_a_graph_is_recorded() -> None:
    cuda = called(launcher(shared=64 << 10), 1, 2, 3, 4)

    for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"):
        assert cuda.modes[name] == RELAXED
    assert cuda.modes["cuLaunchKernel"] == GLOBAL


def test_a_thread_without_modes_loads_kernels_all_the_same() -> None:
    cuda = called(launcher(), 1, 2, 3, 4, cuThreadExchangeStreamCaptureMode=[3])

    assert cuda.asked.count("cuThreadExchangeStreamCaptureMode") == 1
    assert cuda.asked[-1] == "cuLaunchKernel"


def test_sizes_beyond_32_bits_stay_where_the_kernel_takes_64() -> None:
    cuda = called(launcher(passed=("ptr", "ptr", "i64", "i64")), 1, 2, 1 << 33, 1)

    assert cuda.parameters[2:4] == [1 << 33, 1]
    assert cuda.given["cuLaunchKernel"][1] == 1 << 26


def test_more_blocks_than_there_can_be_are_not_fewer() -> None:
    cuda = called(launcher(passed=("ptr", "ptr", "i64", "i64")), 1, 2, (1 << 39) + 128, 1)

    assert cuda.given["cuLaunchKernel"][1] & 0xFFFFFFFF == 1 << 31  # one more than the most


def test_what_a_kernel_does_not_take_is_left_out() -> None:
    cuda = called(launcher(passed=("ptr", "", "", "i32")), 11, 12, 13, 14)

    assert cuda.parameters == [11, 14, 0, 0]


def test_a_kernel_may_have_neither_sizes_nor_parameters_beside() -> None:
    fixed = (Index.of(7), Index.of(2), Index.of(3))
    cuda = called(launcher(passed=("ptr",), symbols=(), grid=fixed, scratch=0), 99)

    assert cuda.given["cuLaunchKernel"][1:4] == [7, 2, 3]
    assert cuda.parameters == [99]


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_launched_over_nothing(rows: int, columns: int) -> None:
    assert called(launcher(), 1, 2, rows, columns).asked == []


def test_each_dimension_of_the_grid_may_be_empty() -> None:
    one = Index.of(1)
    for place in range(3):
        grid = [one, one, one]
        grid[place] = Index.of(N)
        assert called(launcher(grid=tuple(grid)), 1, 2, 0, 1).asked == []
        assert "cuLaunchKernel" in called(launcher(grid=tuple(grid)), 1, 2, 1, 1).asked


@pytest.mark.parametrize(("shared", "asks"), [(0, False), (48 << 10, False), (49 << 10, True)])
def test_much_shared_memory_is_asked_for(shared: int, asks: bool) -> None:
    cuda = called(launcher(shared=shared), 1, 2, 3, 4)

    assert ("cuFuncSetAttribute" in cuda.asked) == asks
    if asks:
        assert cuda.given["cuFuncSetAttribute"] == [FUNCTION, 8, shared]
    assert cuda.given["cuLaunchKernel"][7] == shared


def test_launchers_of_one_module_have_kernels_of_their_own() -> None:
    first = launcher(name="kernel_0", function="one")
    second = launcher(name="kernel_1", function="two", device=0)
    cuda = Cuda(("ptr", "ptr", "i64", "i32"))
    module = load([first, second], cuda.resolve)

    for name, function, device in (("kernel_1", b"two", 0), ("kernel_0", b"one", 2)):
        module.entries[name](1, 2, 3, 4, 1)
        assert cuda.given["cuModuleGetFunction"][2] == function
        assert cuda.given["aoti_torch_get_current_cuda_stream"][0] == device
    assert module.data  # it is stored as it is


# --- failures ---

FAILURES: Final = {
    "cuDevicePrimaryCtxRetain": Asked.CONTEXT,
    "cuCtxSetCurrent": Asked.CONTEXT,
    "cuModuleLoadData": Asked.LOAD,
    "cuModuleGetFunction": Asked.FIND,
    "cuFuncSetAttribute": Asked.SHARED,
    "cuLaunchKernel": Asked.LAUNCH,
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cuda_refuses_is_an_error(name: str) -> None:
    made = launcher(shared=64 << 10)
    cuda = Cuda((*made.passed, "ptr", "ptr"), {name: [209]})
    module = load([made], cuda.resolve)

    with pytest.raises(RuntimeError, match=r"^kernel_3 .*CUDA error 209") as raised:
        module.entries[made.name](1, 2, 3, 4, 1)

    assert cuda.mode == GLOBAL
    assert str(raised.value) == str(launch_error("kernel_3", FAILURES[name] << STEP | 209))


def test_without_a_stream_there_is_no_launch() -> None:
    with pytest.raises(RuntimeError, match="was not told torch's current stream"):
        called(launcher(), 1, 2, 3, 4, aoti_torch_get_current_cuda_stream=[1])


def test_a_kernel_that_was_not_loaded_is_loaded_by_the_next_launch() -> None:
    made = launcher()
    cuda = Cuda(("ptr", "ptr", "i64", "i32"), {"cuModuleLoadData": [2]})
    module = load([made], cuda.resolve)
    entry = module.entries[made.name]

    with pytest.raises(RuntimeError, match="could not be loaded"):
        entry(1, 2, 3, 4, 1)
    entry(1, 2, 3, 4, 1)

    assert cuda.asked.count("cuLaunchKernel") == 1


def test_a_thread_without_a_context_gets_one() -> None:
    made = launcher()
    cuda = Cuda(("ptr", "ptr", "i64", "i32"), {"cuLaunchKernel": [0, INVALID_CONTEXT]})
    module = load([made], cuda.resolve)
    entry = module.entries[made.name]

    entry(1, 2, 3, 4, 1)
    before = len(cuda.asked)
    entry(1, 2, 3, 4, 1)

    wanted = ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"]
    assert cuda.asked[before + 2 :] == wanted


def test_a_thread_that_gets_no_context_fails() -> None:
    answers = {"cuLaunchKernel": [INVALID_CONTEXT, INVALID_CONTEXT]}

    with pytest.raises(RuntimeError, match=f"could not be launched: CUDA error {INVALID_CONTEXT}"):
        called(launcher(), 1, 2, 3, 4, **answers)


def test_arguments_are_handed_on_as_they_can_be() -> None:
    with pytest.raises(AssertionError, match="cannot be handed on as i32"):
        called(launcher(passed=("ptr", "i32", "i64", "i32")), 1, 2, 3, 4)


# --- the driver ---


def test_functions_of_libraries_are_found_as_ever() -> None:
    assert kernel_function("malloc")
    assert kernel_function("PyLong_AsLongLong")


def test_what_the_driver_does_not_have_is_a_gap() -> None:
    with pytest.raises(LookupError, match="cuNothingOfTheKind"):
        kernel_function("cuNothingOfTheKind")


@pytest.mark.parametrize("asked", Asked)
def test_every_failure_has_words(asked: Asked) -> None:
    text = str(launch_error("kernel_0", asked << STEP | 2))

    assert text.startswith("kernel_0 ")
    assert text.endswith(error_text(2))
