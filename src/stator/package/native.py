"""A library in memory: its functions, its containers, and tensors in and out of it."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch

from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import load_object
from stator.codegen.triton.driver import kernel_function
from stator.errors import PackageError, StatorError
from stator.package.archive import NEEDED, OpenFile
from stator.torch_api import TENSOR_IN_OBJECT, WRAP_TENSOR

_P: Final = ctypes.c_void_p
_N: Final = ctypes.c_int64
_CPU: Final = torch.device("cpu")
_FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "stator_open": (_P, ctypes.c_char_p, _N, ctypes.c_int32),
    "stator_run": (_P, _P, _N, _P, _N),
    "stator_level": (),
    "AOTInductorModelContainerDelete": (_P,),
    "AOTInductorModelContainerUpdateConstantBufferPairs": (
        _P,
        _P,
        _N,
        ctypes.c_bool,
        ctypes.c_bool,
    ),
    "AOTInductorModelContainerExtractConstantsMapEntries": (_P, _P, _P, ctypes.c_bool),
    "AOTInductorGetLastError": (_P,),
}
Files = Mapping[str, bytes]


class Container:
    """A program with constants of its own.  Runs from several threads may overlap."""

    def __init__(
        self,
        files: Files,
        stem: str,
        weights: tuple[OpenFile, int],
        outputs: int,
        device: torch.device = _CPU,
    ) -> None:
        """The library `stem` of a package; `weights`: a file, and where in it they begin."""
        file, start = weights
        self._call = _Library(files, stem, device.type)
        self._changing = Lock()
        self.device = device
        self.outputs = outputs
        made = ctypes.c_void_p()
        name = f"/proc/self/fd/{file.number}".encode()  # it is mapped here, and not asked again
        where = (ctypes.addressof(made), name, start, device.index or 0)
        try:
            self._call("stator_open", *where)
        except RuntimeError as error:  # before anything but this was run
            raise PackageError(file.path, str(error)) from error
        self._container = made

    def __del__(self) -> None:
        container = self.__dict__.pop("_container", None)
        if container is not None:
            self._call("AOTInductorModelContainerDelete", container)

    @property
    def handle(self) -> int:
        """What the library knows it by."""
        return int(self._container.value or 0)

    @property
    def address(self) -> int:
        """Of the function that runs it."""
        return self._call.addresses["stator_run"]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the program makes of tensors."""
        # A handle is the address of a tensor within its Python object, which the caller keeps.
        count = len(tensors)
        given = (_P * max(count, 1))(*(id(tensor) + TENSOR_IN_OBJECT for tensor in tensors))
        results = (_P * max(self.outputs, 1))()
        self._call("stator_run", self._container, given, count, results, self.outputs)
        return [_wrapped(handle) for handle in results[: self.outputs]]

    def constants(self) -> list[tuple[str, torch.Tensor]]:
        """The constants that runs read now: their own memory."""
        entries, count = ctypes.c_void_p(), ctypes.c_int64()
        name = "AOTInductorModelContainerExtractConstantsMapEntries"
        where = (ctypes.addressof(entries), ctypes.addressof(count))
        with self._changing:  # the list is the container's, and the tensors are until they are ours
            self._call(name, self._container, *where, False)
            given = count.value
            pairs = (_P * (2 * given)).from_address(entries.value or 0) if given else ()
            return [
                (
                    ctypes.string_at(pairs[2 * number] or 0).decode(),
                    _wrapped(pairs[2 * number + 1], owned=False),
                )
                for number in range(given)
            ]

    def update(self, state: Mapping[str, torch.Tensor], *, full: bool) -> None:
        """Replace constants; runs that are under way end with the old ones."""
        for name, tensor in state.items():
            places = ("cpu", self.device.type)
            if not isinstance(tensor, torch.Tensor) or tensor.device.type not in places:
                raise TypeError(f"{name} is not a tensor on {' or '.join(dict.fromkeys(places))}")
        names = [name.encode() for name in state]
        tensors = list(state.values())
        pairs = (_P * max(2 * len(names), 1))()
        for number, (text, tensor) in enumerate(zip(names, tensors, strict=True)):
            pairs[2 * number] = ctypes.cast(ctypes.c_char_p(text), _P).value
            pairs[2 * number + 1] = id(tensor) + TENSOR_IN_OBJECT
        function = "AOTInductorModelContainerUpdateConstantBufferPairs"
        with self._changing:
            self._call(function, self._container, pairs, len(names), False, full)


class _Library:
    """The functions of a library in memory; a code that is not 0 is an error with its text."""

    def __init__(self, files: Files, stem: str, device: str) -> None:
        linked = f"{stem}.so" in files
        self.addresses = _linked(files, stem, device) if linked else _unlinked(files, stem)
        self.functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(self.addresses[name])
            for name, kinds in _FUNCTIONS.items()
        }

    def __call__(self, name: str, *arguments: Any) -> None:
        if self.functions[name](*arguments):
            text = ctypes.c_void_p()
            self.functions["AOTInductorGetLastError"](ctypes.addressof(text))
            message = ctypes.string_at(text.value or 0).decode(errors="replace")
            raise _error(message)


def _error(message: str) -> Exception:
    """What the library said, as an exception: about inputs a ValueError, else a RuntimeError."""
    about_inputs = message.startswith("input ") or " inputs, and the program" in message
    return ValueError(message) if about_inputs else RuntimeError(message)


_numbers: Final = itertools.count(1)
_kept: Final[dict[bytes, Any]] = {}  # libraries in memory: they stay for as long as the process


def _linked(files: Files, stem: str, device: str) -> dict[str, int]:
    """Addresses in a shared library, loaded from memory: no file is left behind."""
    data = files[f"{stem}.so"]
    if data not in _kept:
        # Torch's libraries by their names, as the linker wrote them down.
        for name in NEEDED[device]:
            path = Path(torch.__file__).parent / "lib" / name
            ctypes.CDLL(str(path) if path.exists() else name)
        with os.fdopen(os.memfd_create("stator_model", os.MFD_CLOEXEC), "wb") as out:
            out.write(data)
            out.flush()
            _kept[data] = ctypes.CDLL(_fresh_name(out.fileno()))
    found = {}
    for name in _FUNCTIONS:
        address = ctypes.cast(getattr(_kept[data], name), _P).value
        assert address is not None, f"{name} has an address"
        found[name] = address
    return found


def _fresh_name(file: int) -> str:
    """A path of an open file that no library had: the loader knows libraries by their paths.

    The number of the file is taken again; a dot more or less, in each place, leads to it as well.
    """
    dots = f"{next(_numbers):b}".replace("0", "/").replace("1", "/.")
    return f"/proc/self/fd{dots}/{file}"


def _unlinked(files: Files, stem: str) -> dict[str, int]:
    """Addresses in object files that were put into memory."""
    names = sorted(name for name in files if name.startswith(stem) and name.endswith(".o"))
    key = b"".join(files[name] for name in names)
    if key not in _kept:
        kernels: dict[str, int] = {}
        code = []
        for name in names:
            if name != f"{stem}.o":
                code.append(load_object(files[name], kernel_function))
                kernels |= code[-1].symbols

        def resolve(name: str) -> int:
            return kernels[name] if name in kernels else kernel_function(name)

        code.append(load_object(files[f"{stem}.o"], resolve))
        _kept[key] = code
    return dict(_kept[key][-1].symbols)


_wrap: Final[list[Any]] = []


def _wrapped(handle: int | None, *, owned: bool = True) -> torch.Tensor:
    """The Python object of a tensor; the handle is let go of."""
    if handle is None:
        raise StatorError("a library returned no tensor where one was promised")
    if not _wrap:
        wrap = ctypes.PYFUNCTYPE(ctypes.py_object, _P)(library_function(WRAP_TENSOR))
        drop = ctypes.CFUNCTYPE(ctypes.c_int32, _P)(
            library_function("aoti_torch_delete_tensor_object")
        )
        _wrap.extend((wrap, drop))
    tensor: torch.Tensor = _wrap[0](handle)
    if owned:
        _wrap[1](handle)
    return tensor
