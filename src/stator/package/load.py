"""Load a package: `model = stator.load("model.pt2")`; then `model(*args)`.

Nothing of the compiler is needed, nor Dynamo: machine code is put into memory, the weights are
mapped from the file, and a call goes through the library's C interface.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from stator.errors import PackageError
from stator.package.archive import FORMAT, LIBRARY, Package, own_version, read_package
from stator.package.native import Container
from stator.torch_api import pytree, tensor_is_in_object

_TOLD: Final[Mapping[str, type]] = {
    **dict.fromkeys(("system", "machine", "device", "kind", "in_spec", "out_spec"), str),
    **{"format": int, "arguments": list, "outputs": list},
}
# What a manifest comes to that is whole and makes no sense, or a library that torch is too old for.
_NONSENSE: Final = (TypeError, ValueError, LookupError, AttributeError, RecursionError, OSError)
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def load(
    path: str | os.PathLike[str],
    *,
    checks_weights: bool = True,
    device: str | torch.device | None = None,
) -> Any:
    """A package as a callable, after it was found whole and made for this machine.

    One for training is a torch.nn.Module, with the parameters that it was built with.
    `checks_weights=False` leaves out reading all weights once, which takes most of the time.
    `device`: which GPU, for a package for GPUs; the current one if it is not said.
    """
    package = read_package(Path(path), checks_weights=checks_weights)
    _check_machine(package)
    place = check_device(package, None if device is None else torch.device(device))
    try:
        if package.manifest["kind"] == "model":
            return Model(package, place)
        from stator.package.trainable import Trainable

        return Trainable(package)
    except _NONSENSE as error:
        built = ", ".join(f"{name} {package.manifest.get(name)}" for name in ("stator", "torch"))
        raise PackageError(
            package.path,
            f"it cannot be loaded: {type(error).__name__}: {error}",
            hint=f"built with {built}; here are stator {own_version()}, torch {torch.__version__}",
        ) from error


def _check_machine(package: Package) -> None:
    told, path = package.manifest, package.path
    missing = [key for key, kind in _TOLD.items() if type(told.get(key)) is not kind]
    if missing:
        raise PackageError(path, f"its manifest does not tell its {missing[0]}")
    if told["kind"] not in ("model", "joint"):
        raise PackageError(path, f"it is of a kind that this stator does not know: {told['kind']}")
    here = (sys.platform, platform.machine())
    wanted = (told["system"], told["machine"])
    if wanted != here:
        raise PackageError(
            path, f"it is for {' on '.join(wanted)}, and this is {' on '.join(here)}"
        )
    version = told["format"]
    if version != FORMAT:
        raise PackageError(path, f"it is of format {version}, and this stator reads {FORMAT}")
    if told["device"] not in ("cpu", "cuda"):
        raise PackageError(path, f"it is for {told['device']}, which this stator does not know")
    if not tensor_is_in_object():
        raise PackageError(path, f"torch {torch.__version__} has tensors in an unknown form")


def check_device(package: Package, asked: torch.device | None) -> int:
    """The number of the device that a package goes to, which must be one that it is for."""
    path, told = package.path, package.manifest
    if asked is not None and asked.type != told["device"]:
        raise PackageError(path, f"it is for {told['device']}, and {asked} was asked for")
    if told["device"] == "cpu":
        return 0
    if not torch.cuda.is_available():
        raise PackageError(
            path,
            "it is for cuda, and torch finds no NVIDIA GPU here",
            hint="load it on a machine with one; or build it from the model on the CPU",
        )
    torch.cuda.init()
    number = torch.cuda.current_device() if asked is None or asked.index is None else asked.index
    if number >= torch.cuda.device_count():
        raise PackageError(path, f"there is no cuda:{number}, but {torch.cuda.device_count()} GPUs")
    major, minor = torch.cuda.get_device_capability(number)
    wanted = divmod(int(told["capability"]), 10)
    if wanted != (major, minor):
        raise PackageError(
            path,
            f"it is for compute capability {wanted[0]}.{wanted[1]}, and cuda:{number} "
            f"({torch.cuda.get_device_name(number)}) has {major}.{minor}",
            hint=f"build it there, or with options={{'gpu_arch': {10 * major + minor}}}",
        )
    return int(number)


class Form:
    """How arguments and results are nested: what a package was built for."""

    def __init__(self, package: Package) -> None:
        told = package.manifest
        self.name = package.path.name
        self.given = pytree.treespec_loads(told["in_spec"])
        self.result = pytree.treespec_loads(told["out_spec"])
        self.arguments = told["arguments"]  # a tensor, or what it was built for
        self.outputs = told["outputs"]
        self.written = told.get("written", ())  # inputs, by number
        # Most programs take tensors one by one, and return one or a tuple: no trees for those.
        fixed = any(one != ["tensor"] for one in self.arguments)
        self.plain = -1 if fixed else _row_of_leaves(self.given)
        self.simple = _form_of(self.result, self.outputs)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The tensors among the arguments, which are of the form that was built for."""
        given: Sequence[torch.Tensor] = args
        if kwargs or len(args) != self.plain or not _PLAIN.issuperset(map(type, args)):
            given = self._checked(self._leaves(args, kwargs))
        if any(map(torch.Tensor.is_neg, given)):
            raise ValueError(
                "an input is a view of the negative of its memory (`z.conj().imag` is); "
                "give it as input.resolve_neg()"
            )
        if self.written:
            self._refuse_shared(given)
        return given

    def _refuse_shared(self, given: Sequence[torch.Tensor]) -> None:
        """What is written to must be apart: the program was traced of inputs that are."""
        places = [one.untyped_storage().data_ptr() for one in given]
        for number in self.written:
            if places[number] and places.count(places[number]) > 1:
                raise ValueError(
                    f"input {number} shares memory with another, and the program writes to it; "
                    "give a clone() of one"
                )

    def results(self, flat: Sequence[torch.Tensor]) -> Any:
        """What the program returns, of its tensors."""
        if self.simple is not None:
            return self.simple(flat)
        stream = iter(flat)
        values = [next(stream) if isinstance(o, int) else o[1] for o in self.outputs]
        return pytree.tree_unflatten(values, self.result)

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Arguments in the order that the program takes; keywords may come in another."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        names = self.given.child(1).context if self.given.num_children == 2 else []
        if spec != self.given and set(names or ()) == set(kwargs):
            leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names or ()}))
        if spec != self.given:
            raise TypeError(
                f"arguments of the form {spec}, and {self.name} was built for {self.given}"
            )
        return list(leaves)

    def _checked(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors among arguments; what is none must be what it was for the example."""
        for number, (leaf, told) in enumerate(zip(leaves, self.arguments, strict=True)):
            if told == ["tensor"]:
                if not isinstance(leaf, torch.Tensor):
                    raise self._another(number, repr(leaf), "a tensor")
                if type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    # What such a class holds, it alone knows: there may be no memory to read.
                    raise self._another(number, f"a {type(leaf).__name__}", "a plain tensor")
            elif type(leaf) is not type(told[1]) or repr(leaf) != repr(told[1]):
                given = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise self._another(number, given, f"{told[1]!r} alone")
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _another(self, number: int, given: str, wanted: str) -> TypeError:
        """That one of the arguments is another than the program was built for."""
        numbered = pytree.tree_unflatten(range(len(self.arguments)), self.given)
        (kind, *path), _ = pytree.tree_flatten_with_path(numbered)[0][number]
        name = ("args", "kwargs")[kind.idx] + pytree.keystr(path)
        return TypeError(f"{name} is {given}, and {self.name} was built for {wanted}")


class Model:
    """A loaded package.  Calls from several threads may overlap."""

    def __init__(self, package: Package, device: int = 0) -> None:
        self.path = package.path
        self.manifest = package.manifest
        self.device = torch.device(package.manifest["device"], device)
        self._form = Form(package)
        count = sum(isinstance(place, int) for place in self._form.outputs)
        weights = (package.file, package.start)
        self._container = Container(package.files, LIBRARY, weights, count, self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        tensors = self._form.tensors(args, kwargs)
        found = self._container.run(tensors)
        if self._form.written:  # autograd is to know: it may have saved them
            increment_version([tensors[number] for number in self._form.written])
        return self._form.results(found)

    def constants(self) -> dict[str, torch.Tensor]:
        """Copies of the constants that calls read now, by name."""
        return {name: tensor.clone() for name, tensor in self._container.constants()}

    def load_constants(
        self, state: Mapping[str, torch.Tensor], *, check_full_update: bool = False
    ) -> None:
        """Replace constants; calls that are under way end with the old ones."""
        self._container.update(state, full=check_full_update)


def _row_of_leaves(spec: Any) -> int:
    """How many arguments there are, if they are leaves one by one and none is named; or -1."""
    args, kwargs = spec.child(0), spec.child(1)
    plain = all(args.child(number).is_leaf() for number in range(args.num_children))
    return args.num_children if plain and not kwargs.num_children else -1


def _form_of(spec: Any, outputs: Sequence[Any]) -> Callable[[Sequence[torch.Tensor]], Any] | None:
    """What makes a result of tensors where that is simple: the only one, a tuple, a list."""
    if not all(isinstance(place, int) for place in outputs):
        return None
    if spec.is_leaf():
        return _the_only_one
    plain = all(spec.child(number).is_leaf() for number in range(spec.num_children))
    return spec.type if plain and spec.type in (tuple, list) else None


def _the_only_one(flat: Sequence[torch.Tensor]) -> torch.Tensor:
    return flat[0]
