"""Load a package: `model = stator.load("model.pt2")`; then `model(*args)`.

Nothing of the compiler is needed, nor Dynamo: machine code is put into memory, the weights are
mapped from the file, and a call goes through the library's C interface.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from stator.codegen.llvm.libraries import library_function
from stator.codegen.llvm.objects import load_object
from stator.errors import PackageError, StatorError
from stator.package.archive import FORMAT, MODEL, Package, read_package
from stator.torch_api import TENSOR_IN_OBJECT, WRAP_TENSOR, pytree, tensor_is_in_object

_P: Final = ctypes.c_void_p
_N: Final = ctypes.c_int64
_LIBRARY: Final = f"{MODEL}/model.wrapper.so"
_TOLD: Final = ("system", "machine", "format", "device", "levels", "in_spec", "out_spec", "outputs")
_FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "stator_open": (_P, ctypes.c_char_p, _N),
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
    "AOTInductorModelContainerSwapConstantBuffer": (_P,),
    "AOTInductorModelContainerExtractConstantsMapEntries": (_P, _P, _P, ctypes.c_bool),
    "AOTInductorGetLastError": (_P,),
}


def load(path: str | os.PathLike[str], *, checks_weights: bool = True) -> Model:
    """A package as a callable, after it was found whole and made for this machine.

    `checks_weights=False` leaves out reading all weights once, which takes most of the time.
    """
    package = read_package(Path(path), checks_weights=checks_weights)
    _check_machine(package)
    return Model(package)


def _check_machine(package: Package) -> None:
    told, path = package.manifest, package.path
    missing = [key for key in _TOLD if key not in told]
    if missing:
        raise PackageError(path, f"its manifest does not tell its {missing[0]}")
    here = (sys.platform, platform.machine())
    if (told["system"], told["machine"]) != here:
        raise PackageError(
            path,
            f"it is for {told['system']} on {told['machine']}, and this is {' on '.join(here)}",
        )
    if told["format"] != FORMAT:
        raise PackageError(
            path, f"it is of format {told['format']}, and this stator reads {FORMAT}"
        )
    if told["device"] != "cpu":
        raise PackageError(path, f"it is for {told['device']}, and this stator loads for the CPU")
    if not tensor_is_in_object():
        raise PackageError(path, f"torch {torch.__version__} has tensors in an unknown form")


class Model:
    """A loaded package.  Calls from several threads may overlap."""

    def __init__(self, package: Package) -> None:
        self.path = package.path
        self.manifest = package.manifest
        self._call = _Library(package)
        self._file = os.open(package.path, os.O_RDONLY | os.O_CLOEXEC)
        self._container = self._open(package.start)
        self._in = pytree.treespec_loads(package.manifest["in_spec"])
        self._out = pytree.treespec_loads(package.manifest["out_spec"])
        self._outputs = package.manifest["outputs"]
        self._count = sum(isinstance(place, int) for place in self._outputs)
        # Most programs take tensors one by one, and return one or a tuple: no trees for those.
        self._plain = _row_of_leaves(self._in)
        self._result = _form_of(self._out, self._outputs)

    def _open(self, start: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        path = f"/proc/self/fd/{self._file}".encode()
        self._call("stator_open", ctypes.addressof(made), path, start)
        return made

    def __del__(self) -> None:
        container = self.__dict__.pop("_container", None)
        if container is not None:
            self._call("AOTInductorModelContainerDelete", container)
        file = self.__dict__.pop("_file", None)
        if file is not None:
            os.close(file)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == self._plain and all(map(torch.is_tensor, args)):
            flat = self._run(args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if spec != self._in:
                leaves = self._reordered(args, kwargs, spec)
            flat = self._run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if self._result is not None:
            return flat[0] if self._result is torch.Tensor else self._result(flat)
        stream = iter(flat)
        values = [next(stream) if isinstance(o, int) else o[1] for o in self._outputs]
        return pytree.tree_unflatten(values, self._out)

    def _reordered(self, args: Any, kwargs: Any, spec: Any) -> list[Any]:
        """Keywords may come in another order; everything else must be as it was built for."""
        names = self._in.child(1).context if self._in.num_children == 2 else []
        if set(names or ()) == set(kwargs):
            ordered = {name: kwargs[name] for name in names or ()}
            leaves, spec = pytree.tree_flatten((args, ordered))
            if spec == self._in:
                return list(leaves)
        raise TypeError(
            f"arguments of the form {spec}, and {self.path.name} was built for {self._in}"
        )

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # A handle is the address of a tensor within its Python object, which the list keeps.
        count = len(tensors)
        given = (_P * max(count, 1))(*(id(tensor) + TENSOR_IN_OBJECT for tensor in tensors))
        results = (_P * max(self._count, 1))()
        self._call("stator_run", self._container, given, count, results, self._count)
        return [_wrapped(handle) for handle in results[: self._count]]

    # --- weights ---

    def constants(self) -> dict[str, torch.Tensor]:
        """Copies of the constants that calls read now, by name."""
        return {name: tensor.clone() for name, tensor in self._constants()}

    def _constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        entries, count = ctypes.c_void_p(), ctypes.c_int64()
        name = "AOTInductorModelContainerExtractConstantsMapEntries"
        where = (ctypes.addressof(entries), ctypes.addressof(count))
        self._call(name, self._container, *where, False)
        pairs = (_P * (2 * count.value)).from_address(entries.value or 0) if count.value else ()
        for number in range(count.value):
            text = ctypes.string_at(pairs[2 * number] or 0).decode()
            yield text, _wrapped(pairs[2 * number + 1], owned=False)

    def load_constants(
        self, state: Mapping[str, torch.Tensor], *, check_full_update: bool = False
    ) -> None:
        """Replace constants; calls that are under way end with the old ones."""
        names = [name.encode() for name in state]
        tensors = list(state.values())
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                raise TypeError(f"{name} is not a tensor on the CPU")
        pairs = (_P * max(2 * len(names), 1))()
        for number, (text, tensor) in enumerate(zip(names, tensors, strict=True)):
            pairs[2 * number] = ctypes.cast(ctypes.c_char_p(text), _P).value
            pairs[2 * number + 1] = id(tensor) + TENSOR_IN_OBJECT
        function = "AOTInductorModelContainerUpdateConstantBufferPairs"
        self._call(function, self._container, pairs, len(names), False, check_full_update)


def _row_of_leaves(spec: Any) -> int:
    """How many arguments there are, if they are leaves one by one and none is named; or -1."""
    args, kwargs = spec.child(0), spec.child(1)
    plain = all(args.child(number).is_leaf() for number in range(args.num_children))
    return args.num_children if plain and not kwargs.num_children else -1


def _form_of(spec: Any, outputs: Sequence[Any]) -> Any:
    """What is made of a list of tensors: Tensor for the only one, a list, a tuple; None: more."""
    if not all(isinstance(place, int) for place in outputs):
        return None
    if spec.is_leaf():
        return torch.Tensor
    plain = all(spec.child(number).is_leaf() for number in range(spec.num_children))
    return spec.type if plain and spec.type in (tuple, list) else None


class _Library:
    """The functions of a library in memory; a code that is not 0 is an error with its text."""

    def __init__(self, package: Package) -> None:
        self.functions = dict(_found(package))

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


def _found(package: Package) -> Iterator[tuple[str, Any]]:
    addresses = _linked(package) if _LIBRARY in package.files else _unlinked(package)
    for name, kinds in _FUNCTIONS.items():
        yield name, ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(addresses[name])


_kept: Final[dict[bytes, Any]] = {}  # libraries in memory: they stay for as long as the process


def _linked(package: Package) -> dict[str, int]:
    """Addresses in a shared library, loaded from memory: no file is left behind."""
    data = package.files[_LIBRARY]
    if data not in _kept:
        # The number stays taken: the loader knows libraries by name.
        handle = os.memfd_create("stator_model", os.MFD_CLOEXEC)
        os.write(handle, data)
        _torch_is_there()
        _kept[data] = ctypes.CDLL(f"/proc/self/fd/{handle}")
    library = _kept[data]
    found = {}
    for name in _FUNCTIONS:
        address = ctypes.cast(getattr(library, name), _P).value
        assert address is not None, f"{name} has an address"
        found[name] = address
    return found


def _torch_is_there() -> None:
    """Load torch's library by its name, as the linker wrote it down."""
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _unlinked(package: Package) -> dict[str, int]:
    """Addresses in object files that were put into memory."""
    key = b"".join(package.files[name] for name in sorted(package.files) if name.endswith(".o"))
    if key not in _kept:
        kernels: dict[str, int] = {}
        code = []
        for level in package.manifest["levels"]:
            name = f"{MODEL}/kernels_{level}.o"
            if name in package.files:
                code.append(load_object(package.files[name], library_function))
                kernels |= code[-1].symbols

        def resolve(name: str) -> int:
            return kernels[name] if name in kernels else library_function(name)

        code.append(load_object(package.files[f"{MODEL}/model.o"], resolve))
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
