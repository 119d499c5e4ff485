"""A package for training, loaded: a module with parameters, and a compiled backward behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stator.aot.assemble import assemble
from stator.aot.function import BackwardGraph, StoredBackward
from stator.aot.metadata import Facts
from stator.cache.codec import from_bytes
from stator.core.torch_types import Boxed, Flat
from stator.errors import PackageError, Unsupported
from stator.package.archive import FACTS, STEMS, Package
from stator.package.load import Form
from stator.package.native import Container


class Trainable(torch.nn.Module):
    """A loaded program with its parameters and buffers, under the names that they had."""

    def __init__(self, package: Package) -> None:
        super().__init__()
        self.path = package.path
        self.manifest = package.manifest
        self.training = package.manifest.get("training", True)
        self._form = Form(package)
        told = from_bytes(package.files[FACTS], ())
        if not isinstance(told, tuple) or [type(one) for one in told] != [Facts, StoredBackward]:
            raise PackageError(package.path, "it does not tell what its program does")
        facts, stored = told
        runs = {name: _run_of(package, name) for name in STEMS}
        backward = _Backward(BackwardGraph(runs["backward"], stored.tangents, stored.like))
        self._call = assemble(_no_more, facts, runs["forward"], backward, _Refusing())
        pairs = zip(self.manifest["tensors"], facts.program.inputs, strict=True)
        self._asked = [
            (name, fact.requires_grad) for (kind, name, _), fact in pairs if kind == "input"
        ]
        self._take_state(package)

    def _take_state(self, package: Package) -> None:
        """Parameters and buffers from the file; one that has two names is one."""
        held = {one["name"]: one for one in package.manifest["constants"]}
        made: dict[Any, torch.Tensor] = {}
        for kind, name, trains in package.manifest["tensors"]:
            if kind == "input":
                continue
            told = held[name]
            key = (told["offset"], *told["size"], *told["stride"], told["dtype"])
            if key not in made:
                raw = package.file.read(package.start + told["offset"], told["bytes"])
                value = _tensor(told, raw)
                is_parameter = trains or kind == "parameter"  # earlier packages do not say it
                made[key] = torch.nn.Parameter(value, trains) if is_parameter else value
            _put(self, name, made[key], is_state=kind == "state")

    def train(self, mode: bool = True) -> Trainable:
        """The mode that the program was built in is the only one that it has."""
        if mode != self.training:
            built, other = ("train", "eval") if self.training else ("eval", "train")
            raise Unsupported(
                "package",
                f"{self.path.name} was built of a model in {built}(), and has no {other}()",
                hint=f"build another of model.{other}(), and give it this one's state_dict",
            )
        super().train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns, for autograd to go on with."""
        inputs = self._form.tensors(args, kwargs)
        if torch.is_grad_enabled():
            self._refuse_lost_gradients(inputs)
        given = iter(inputs)
        tensors = [
            next(given, None) if kind == "input" else _get(self, name)
            for kind, name, _ in self.manifest["tensors"]
        ]
        return self._form.results(self._call(*tensors))

    def _refuse_lost_gradients(self, inputs: Sequence[torch.Tensor]) -> None:
        """What an input is computed of would not train, and nobody would know."""
        for (name, asked), one in zip(self._asked, inputs, strict=True):
            if one.requires_grad and not asked:
                raise ValueError(
                    f"input {name} asks for a gradient, and {self.path.name} was built without it; "
                    f"build it of an example that asks, or give {name}.detach()"
                )


def _tensor(told: dict[str, Any], raw: bytearray) -> torch.Tensor:
    dtype = getattr(torch, told["dtype"])
    if not raw:
        return torch.empty_strided(told["size"], told["stride"], dtype=dtype)
    flat = torch.frombuffer(raw, dtype=dtype)
    return flat.as_strided(told["size"], told["stride"])


def _put(module: torch.nn.Module, name: str, value: torch.Tensor, *, is_state: bool) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    if isinstance(value, torch.nn.Parameter):
        module.register_parameter(last, value)
    else:
        module.register_buffer(last, value, persistent=is_state)


def _get(module: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(path), last)
    return found


def _run_of(package: Package, name: str) -> Boxed:
    """A half as a function from a list, which it empties, to a list."""
    outputs = package.manifest["parts"][name]
    start = package.start + package.manifest["starts"][name]
    count = sum(isinstance(place, int) for place in outputs)
    container = Container(package.files, STEMS[name], (package.file, start), count)

    def run(arguments: list[Any]) -> Sequence[Any]:
        # Numbers are sizes of the tensors beside them: the library reads them there.
        flat = iter(container.run([one for one in arguments if isinstance(one, torch.Tensor)]))
        found = []
        for place in outputs:
            match place:
                case int():
                    found.append(next(flat))
                case ["size", number, dim]:
                    found.append(arguments[number].size(dim))
                case [_, constant]:
                    found.append(constant)
        arguments.clear()
        return found

    return run


class _Backward:
    """The one backward that a package has: for gradients of all outputs."""

    def __init__(self, graph: BackwardGraph) -> None:
        self.graph = graph

    def backward(self, missing: tuple[bool, ...]) -> BackwardGraph:
        """The graph; a gradient that did not come is zero for it."""
        return BackwardGraph(self.graph.run, tuple(range(len(missing))), self.graph.like)


def _no_more(*_: Any) -> Sequence[Any]:
    raise Unsupported(
        "package",
        "derivatives of higher order are not in a package",
        hint="compile the model with torch.compile(backend='stator') for them",
    )


class _Refusing:
    """Compiles nothing."""

    def specialize(self, function: Flat, *, replays_random: bool = False) -> Flat:
        """What fails when it is called."""
        return _no_more
