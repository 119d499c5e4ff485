"""A GPU that is none: its tensors lie on the CPU, and Triton's interpreter runs its kernels.

Programs are exported on fake tensors of a GPU and built as ever, cubins included.  Their object
files are then bound to functions that say of every tensor that it is on `cuda:1`, and that note
what is asked of the driver.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stator.codegen.triton import backend
from stator.codegen.triton.driver import kernel_function
from stator.codegen.triton.interpreted import interpreted
from stator.codegen.triton.launch import Launcher
from stator.loops.ir import Kernel
from stator.package import native
from stator.package.archive import LIBRARY, read_package
from stator.package.load import Model
from stator.torch_api import TENSOR_IN_OBJECT, FakeTensorMode

NUMBER: Final = 1  # of the device
STREAM, CONTEXT, GUARD, MODULE = 0x5000, 0xC000, 0x6000, 0xD000
P, W, N = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def exported(model: nn.Module, args: tuple[Any, ...], dynamic: Any = None) -> ExportedProgram:
    """A program of a GPU, whose weights are the model's."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            size, stride = value.size(), value.stride()
            return torch.empty_strided(size, stride, dtype=value.dtype, device="cuda:0")

    twin = copy.deepcopy(model)
    for module in twin.modules():
        for held in (module._parameters, module._buffers):
            for name, value in list(held.items()):
                if value is not None:
                    is_parameter = isinstance(value, nn.Parameter)
                    held[name] = nn.Parameter(fake(value), False) if is_parameter else fake(value)
    with mode, torch.no_grad():
        program = export(twin, tuple(map(fake, args)), dynamic_shapes=dynamic)
    for name, value in model.state_dict().items():
        program.state_dict[name] = value.detach()
    return program


@dataclass
class Card:
    """Answers for torch's CUDA library and for the driver, and notes what it was asked for."""

    capability: tuple[int, int] = (9, 0)
    kind: int = 1  # of device that it says tensors to be on
    place: int = NUMBER  # which of them
    answers: dict[str, int] = field(default_factory=dict)  # codes other than 0
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    kernels: dict[bytes, tuple[Kernel, Launcher]] = field(default_factory=dict)  # by their cubins
    images: list[bytes] = field(default_factory=list)  # that were loaded
    kept: list[Any] = field(default_factory=list)

    # --- building ---

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember which kernel a cubin is of, while a package is built."""
        made = backend._launcher

        def noted(kernel: Kernel, *rest: Any) -> Launcher:
            launcher = made(kernel, *rest)
            self.kernels[launcher.cubin] = (kernel, launcher)
            return launcher

        with mock.patch.object(backend, "_launcher", noted):
            yield

    # --- running ---

    def loaded(self, path: Path) -> Model:
        """A package for a GPU that was built without a linker, on this card."""
        package = read_package(path)
        with (
            mock.patch.object(native, "kernel_function", self.function),
            mock.patch.dict(native._kept, clear=True),
        ):
            assert f"{LIBRARY}.o" in package.files
            model = Model(package, NUMBER)
            _KEPT.append((self.kept, dict(native._kept)))  # longer than any model
            return model

    def run_on_stream(self, model: Model, x: Tensor, stream: int | None) -> None:
        """Run a model of one input as torch's runner does, which gives its handle away."""
        container = model._container
        given, results = (P * 1)(), (P * container.outputs)()
        make = ctypes.CFUNCTYPE(W, P, P)(kernel_function("aoti_torch_new_tensor_handle"))
        make(id(x) + TENSOR_IN_OBJECT, given)
        run = ctypes.CFUNCTYPE(W, P, P, N, P, N, P, P)
        address = container._call.addresses["AOTInductorModelContainerRun"]
        code = run(address)(container.handle, given, 1, results, len(results), stream, None)
        assert code == 0
        for handle in results:
            native._wrapped(handle)

    def names(self) -> list[str]:
        """What was asked for, in order."""
        return [name for name, *_ in self.asked]

    def function(self, name: str) -> int:
        """Where one of the functions is that a library calls."""
        kinds = _KINDS.get(name)
        if kinds is None:
            return kernel_function(name.replace("aoti_torch_cuda_", "aoti_torch_cpu_"))
        own: Callable[..., int | None] = getattr(self, f"_{name.lower()}", lambda *_: None)

        def called(*given: Any) -> int:
            if name not in _QUIET:
                self.asked.append((name, *given))
            if name in self.answers:
                return self.answers[name]
            return own(*given) or 0

        made = ctypes.CFUNCTYPE(W, *kinds)(called)
        self.kept.append(made)
        address = ctypes.cast(made, P).value
        assert address is not None
        return address

    def _aoti_torch_get_device_type(self, tensor: int, out: int) -> None:
        W.from_address(out).value = self.kind

    def _aoti_torch_get_device_index(self, tensor: int, out: int) -> None:
        W.from_address(out).value = self.place

    def _aoti_torch_empty_strided(self, *given: Any) -> int:
        *layout, kind, _, out = given
        assert kind == 1, "programs of a GPU make tensors there"
        make = ctypes.CFUNCTYPE(W, N, P, P, W, W, W, P)
        return int(make(kernel_function("aoti_torch_empty_strided"))(*layout, 0, -1, out))

    def _aoti_torch_call_dispatcher(self, name: bytes, overload: bytes, stack: int) -> int:
        if name == b"aten::_assert_tensor_metadata":  # it would find the tensor on the CPU
            return 0
        call = ctypes.CFUNCTYPE(W, ctypes.c_char_p, ctypes.c_char_p, P)
        return int(call(kernel_function("aoti_torch_call_dispatcher"))(name, overload, stack))

    def _aoti_torch_create_cuda_guard(self, number: int, out: int) -> None:
        P.from_address(out).value = GUARD

    def _aoti_torch_create_cuda_stream_guard(self, stream: int, number: int, out: int) -> None:
        P.from_address(out).value = GUARD

    def _aoti_torch_get_current_cuda_stream(self, number: int, out: int) -> None:
        P.from_address(out).value = STREAM

    def _cudeviceget(self, out: int, number: int) -> None:
        W.from_address(out).value = number

    def _cudevicegetattribute(self, out: int, which: int, card: int) -> None:
        W.from_address(out).value = self.capability[which - 75]

    def _cudeviceprimaryctxretain(self, out: int, number: int) -> None:
        P.from_address(out).value = CONTEXT

    def _cumoduleloaddata(self, out: int, image: int) -> None:
        # The shorter first: of a longer one more would be read than there may be memory for.
        known = sorted(self.kernels, key=len)
        found = next(c for c in known if ctypes.string_at(image, len(c)) == c)
        self.images.append(found)
        P.from_address(out).value = MODULE + len(self.images) - 1

    def _cumodulegetfunction(self, out: int, module: int, name: bytes) -> None:
        assert self.kernels[self.images[module - MODULE]][1].function == name.decode()
        P.from_address(out).value = module

    def _culaunchkernel(self, function: int, *given: Any) -> None:
        kernel, launcher = self.kernels[self.images[function - MODULE]]
        taken = [kind for kind in launcher.passed if kind]
        cells = (ctypes.c_uint64 * len(taken)).from_address(given[8])
        words = iter(
            _READ[kind].from_address(cell).value for kind, cell in zip(taken, cells, strict=True)
        )
        assert all(launcher.passed), "the interpreter takes all"
        interpreted(kernel)(*(word or 0 for word in words), 1)


_KEPT: Final[list[Any]] = []
_READ: Final[Mapping[str, Any]] = {"ptr": P, "i64": N, "i32": W}
_QUIET: Final = ("aoti_torch_get_device_type", "aoti_torch_get_device_index", "cuGetErrorString")
_KINDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "aoti_torch_get_device_type": (P, P),
    "aoti_torch_get_device_index": (P, P),
    "aoti_torch_call_dispatcher": (ctypes.c_char_p, ctypes.c_char_p, P),
    "aoti_torch_empty_strided": (N, P, P, W, W, W, P),
    "aoti_torch_create_cuda_guard": (W, P),
    "aoti_torch_delete_cuda_guard": (P,),
    "aoti_torch_create_cuda_stream_guard": (P, W, P),
    "aoti_torch_delete_cuda_stream_guard": (P,),
    "aoti_torch_get_current_cuda_stream": (W, P),
    "cuInit": (W,),
    "cuDeviceGet": (P, W),
    "cuDeviceGetAttribute": (P, W, W),
    "cuGetErrorString": (W, P),
    "cuDevicePrimaryCtxRetain": (P, W),
    "cuCtxSetCurrent": (P,),
    "cuThreadExchangeStreamCaptureMode": (P,),
    "cuModuleLoadData": (P, P),
    "cuModuleGetFunction": (P, P, ctypes.c_char_p),
    "cuFuncSetAttribute": (P, W, W),
    "cuLaunchKernel": (P, *[W] * 7, P, P, P),
}
