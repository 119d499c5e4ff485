"""Compiled programs to bytes and back: data only, by a short list of what may be inside.

JSON holds the structure, with a tag on whatever JSON has no word for; object files and tensors
follow behind it.  Nothing is executed to read it, and what is not on the list is refused when it is
written.  Lines of the user's program stand for themselves by number: no path is stored.
"""

from __future__ import annotations

import ctypes
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import import_module
from typing import Any, Final

import torch

from stator.aot import metadata, subclasses, views
from stator.aot.function import StoredBackward
from stator.core.events import Held
from stator.graph import recipe
from stator.runtime.constants import Furnished
from stator.runtime.cuda_graphs import Recordable
from stator.runtime.native.image import Image, Operator
from stator.runtime.rare import Annotate, Note
from stator.runtime.recorded import Recorded
from stator.torch_api import OpOverload, operator_named

_DATA: Final[Mapping[str, type]] = {
    cls.__name__: cls
    for cls in (
        metadata.Facts,
        metadata.InputFact,
        metadata.OutputFact,
        metadata.Program,
        metadata.Saved,
        metadata.TangentPlan,
        metadata.ValueFact,
        subclasses.Plain,
        views.Geometry,
        views.Step,
        views.View,
        Annotate,
        Held,
        Image,
        Operator,
        StoredBackward,
        recipe.Constants,
        recipe.Do,
        recipe.Made,
        recipe.Recipe,
        recipe.Weight,
        Furnished,
        Recordable,
        Recorded,
    )
}
_ENUMS: Final[Mapping[str, type[Enum]]] = {
    cls.__name__: cls for cls in (metadata.Kept, metadata.Mutation, metadata.Source)
}
# Names of torch's that stand for themselves: torch.float32, torch.strided, …
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format)
_BUILTINS: Final = (slice, abs, bool, float, int, max, min, pow, round)
# Modules of functions that run.
_OURS: Final = (
    "stator.runtime.rare",
    "stator.ops.draws",
    "stator.ops.packs",
    "stator.ops.promises",
    "stator.ops.writes",
)


class NotData(Exception):  # noqa: N818  says what it is
    """A value that no other process could make from data."""


def to_bytes(value: Any, lines: Sequence[str]) -> bytes:
    """A value as bytes; `lines` are those of the user's program that it may name."""
    writer = _Writer({line: number for number, line in enumerate(lines)})
    tree = writer.tree(value)
    head = {"lengths": [len(blob) for blob in writer.blobs], "tree": tree}
    try:
        text = json.dumps(head, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    except ValueError as error:  # Python writes no number of thousands of digits
        raise NotData(str(error)) from error
    return len(text).to_bytes(8, "little") + text + b"".join(writer.blobs)


def from_bytes(data: bytes, lines: Sequence[str]) -> Any:
    """The value again; `lines` as they were when it was written, wherever the files are now."""
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    blobs, start = [], 8 + size
    for length in head["lengths"]:
        blobs.append(data[start : start + length])
        start += length
    return _Reader(blobs, lines).value(head["tree"])


@dataclass(slots=True)
class _Writer:
    lines: Mapping[str, int]
    blobs: list[bytes] = field(default_factory=list)
    writers: tuple[tuple[Any, Callable[[Any], Any]], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.writers = self._writers()

    def tree(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        for kinds, write in self.writers:
            if isinstance(value, kinds):
                return write(value)
        kind = _DATA.get(type(value).__name__)
        if kind is type(value):
            parts = [self.tree(getattr(value, part.name)) for part in fields(kind)]
            return ["data", kind.__name__, *parts]
        if callable(value):
            return ["function", *_path_of(value)]
        raise NotData(f"a {type(value).__name__} is no data")

    def _writers(self) -> tuple[tuple[Any, Callable[[Any], Any]], ...]:
        return (
            (bytes, lambda v: ["bytes", self._blob(v)]),
            (float, lambda v: ["float", v.hex()]),
            (complex, lambda v: ["complex", v.real.hex(), v.imag.hex()]),
            (torch.Size, lambda v: ["size", *map(self.tree, v)]),
            (tuple, lambda v: ["tuple", *map(self.tree, v)]),
            (list, lambda v: ["list", *map(self.tree, v)]),
            (dict, lambda v: ["dict", *([self.tree(k), self.tree(x)] for k, x in v.items())]),
            (slice, lambda v: ["slice", self.tree(v.start), self.tree(v.stop), self.tree(v.step)]),
            (type(Ellipsis), lambda v: ["ellipsis"]),
            (_NAMED, lambda v: ["torch", str(v).removeprefix("torch.")]),
            (torch.device, lambda v: ["device", str(v)]),
            (torch.Tensor, self._tensor),
            (OpOverload, lambda v: ["operator", v.name()]),
            (Enum, self._enum),
            (Note, lambda v: ["note", v.called, self.lines.get(v.line)]),
        )

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        plain = type(value) is torch.Tensor and value.device.type == "cpu"
        if not plain or value.layout is not torch.strided or value.requires_grad:
            raise NotData(f"a constant that is a {type(value).__name__} on {value.device}")
        pairs = zip(value.size(), value.stride(), strict=True)
        if value.is_quantized or any(size > 1 and not stride for size, stride in pairs):
            raise NotData("a constant that is quantized, or expanded")
        try:
            dense = value.detach().clone(memory_format=torch.contiguous_format)
        except RuntimeError as error:  # types of few bits, which torch itself cannot copy
            raise NotData(f"a constant of type {value.dtype}") from error
        raw = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.numel() else b""
        numbers = [list(value.size()), list(value.stride())]
        return ["tensor", str(value.dtype).removeprefix("torch."), *numbers, self._blob(raw)]

    def _enum(self, value: Enum) -> list[Any]:
        if _ENUMS.get(type(value).__name__) is not type(value):
            raise NotData(f"a {type(value).__name__} is no data")
        return ["enum", type(value).__name__, value.name]


@dataclass(frozen=True, slots=True)
class _Reader:
    blobs: Sequence[bytes]
    lines: Sequence[str]

    def value(self, tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        tag, *rest = tree
        if tag not in _TAGS:
            raise NotData(f"{tag!r} is no kind of data")
        read: Callable[..., Any] = getattr(self, f"_{tag}")
        return read(*rest)

    def _bytes(self, number: int) -> bytes:
        return self.blobs[number]

    def _float(self, text: str) -> float:
        return float.fromhex(text)

    def _complex(self, real: str, imaginary: str) -> complex:
        return complex(float.fromhex(real), float.fromhex(imaginary))

    def _size(self, *items: Any) -> torch.Size:
        return torch.Size(items)

    def _tuple(self, *items: Any) -> tuple[Any, ...]:
        return tuple(map(self.value, items))

    def _list(self, *items: Any) -> list[Any]:
        return list(map(self.value, items))

    def _dict(self, *items: Any) -> dict[Any, Any]:
        return {self.value(key): self.value(item) for key, item in items}

    def _slice(self, *parts: Any) -> slice:
        return slice(*map(self.value, parts))

    def _ellipsis(self) -> Any:
        return ...

    def _torch(self, name: str) -> Any:
        value = getattr(torch, name)
        if not isinstance(value, _NAMED):
            raise NotData(f"torch.{name} is no data")
        return value

    def _device(self, name: str) -> torch.device:
        return torch.device(name)

    def _tensor(self, dtype: str, size: list[int], stride: list[int], number: int) -> torch.Tensor:
        dense = torch.empty(size, dtype=getattr(torch, dtype))
        raw = self.blobs[number]
        if len(raw) != dense.nbytes:
            raise NotData(f"a constant has {len(raw)} bytes instead of {dense.nbytes}")
        ctypes.memmove(dense.data_ptr(), raw, len(raw))
        return torch.empty_strided(size, stride, dtype=dense.dtype).copy_(dense)

    def _operator(self, name: str) -> Any:
        return operator_named(name)

    def _enum(self, kind: str, name: str) -> Enum:
        return _ENUMS[kind][name]

    def _note(self, called: str, line: int | None) -> Note:
        return Note(called, None if line is None else self.lines[line])

    def _data(self, kind: str, *parts: Any) -> Any:
        return _DATA[kind](*map(self.value, parts))

    def _function(self, module: str, name: str) -> Any:
        value = _found(module, name)
        if _path_of(value) != (module, name):
            raise NotData(f"{module}.{name} is somebody else's")
        return value


_TAGS: Final = frozenset(
    name.removeprefix("_")
    for name in vars(_Reader)
    if name.startswith("_") and not name.startswith("__")
)


def _path_of(value: Any) -> tuple[str, str]:
    """Where other processes find a function or an exception."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if getattr(operator, str(name), None) is value:
        module = "operator"
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotData(f"a {type(value).__name__} is no data")
    try:
        found = _found(module, name)
    except (NotData, AttributeError, ImportError):
        found = None
    if found is not value:
        raise NotData(f"{module}.{name} is not torch's, nor ours")
    return module, name


def _found(module: str, name: str) -> Any:
    """What stands under a name in torch, `operator` or `math`, or is one of a few others."""
    if module == "builtins":
        known = {kind.__name__: kind for kind in _BUILTINS}
        if name in known:
            return known[name]
        error = getattr(sys.modules["builtins"], name)
        if isinstance(error, type) and issubclass(error, Exception):
            return error
        raise NotData(f"builtins.{name} is no data")
    if module.split(".")[0] not in ("torch", "math", "operator") and module not in _OURS:
        raise NotData(f"{module}.{name} is not torch's, nor ours")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value
