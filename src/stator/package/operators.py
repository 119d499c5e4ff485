"""Compiled operators on disk, each entry for one kind of arguments.

    <cache>/aoti_eager/<namespace>/<device>/<operator>.json     a list of entries
    <cache>/aoti_eager/<namespace>/<device>/lib/<key>.pt2       what they name

Entries do not depend on each other: one that is damaged, whose library is gone, or that another
version made is left out, with a warning, and replaced when it is compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from stator.errors import PackageError, StatorWarning
from stator.package.archive import own_version, read_package
from stator.torch_api import dispatch_keys

_NUMBERS: Final = {bool: "torch.bool", int: "torch.int32", float: "torch.float32"}


def described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What arguments are, in the order of the call: keywords behind, by name."""
    values = [*args, *(kwargs[name] for name in sorted(kwargs))]
    names = [None] * len(args) + sorted(kwargs)
    return [
        {"arg_order": order, **({} if name is None else {"name": name}), **_described(value)}
        for order, (name, value) in enumerate(zip(names, values, strict=True))
    ]


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple) and all(isinstance(one, torch.Tensor) for one in value):
        return {"tensor_list": [_tensor(one) for one in value]}
    if isinstance(value, list | tuple):
        return {"list_value": list(map(_described, value))}
    if type(value) in _NUMBERS:
        kind = _NUMBERS[type(value)]
        return {"device_type": "cpu", "dtype": kind, "scalar_value": value}
    if isinstance(value, str):
        return {"string_value": value}
    if isinstance(value, torch.dtype):
        return {"dtype_value": str(value)}
    if isinstance(value, torch.device):
        index = -1 if value.index is None else value.index
        return {"device_type_value": value.type, "device_index_value": index}
    if isinstance(value, torch.layout):
        return {"layout_value": str(value)}
    if value is None:
        return {"none": True}
    raise TypeError(f"an operator that is cached takes no {type(value).__name__}")


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise TypeError(f"an operator that is cached takes no tensor on {value.device}")
    return {
        "is_dynamic": False,
        "device_type": "cpu",
        "device_index": -1,
        "dtype": str(value.dtype),
        "sizes": list(value.size()),
        "strides": list(value.stride()),
        "requires_grad": value.requires_grad,
        "dispatch_key_set": dispatch_keys(value),
    }


@dataclass(frozen=True, slots=True)
class OperatorCache:
    """The entries of one operator."""

    folder: Path  # of its namespace and device
    name: str  # with its overload

    @property
    def file(self) -> Path:
        """Where the entries are."""
        return self.folder / f"{self.name}.json"

    def key(self, meta: Any, options: Mapping[str, Any]) -> str:
        """A name for a library: of what it is for, and who made it."""
        parts = [self.name, meta, _plain(options), own_version(), torch.__version__]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(self, meta: Any, options: Mapping[str, Any]) -> Path | None:
        """The library for such arguments."""
        wanted = self.key(meta, options)
        for entry in self.entries():
            path: Path = self.folder / entry["kernel_path"]
            if path.stem == wanted and entry["meta_info"] == meta and self._is_whole(path):
                return path
        return None

    def entries(self) -> list[dict[str, Any]]:
        """All that can be used."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._report(f"its list cannot be read: {error}")
            return []
        if not isinstance(found, list):
            self._report("its list is none")
            return []
        return [entry for entry in found if self._is_good(entry)]

    def _is_good(self, entry: Any) -> bool:
        is_entry = isinstance(entry, dict) and isinstance(entry.get("meta_info"), list)
        if not is_entry or not isinstance(entry.get("kernel_path"), str):
            self._report("an entry is damaged")
            return False
        made = (entry.get("stator"), entry.get("torch"))
        if made != (own_version(), torch.__version__):
            return False  # another version's: it is compiled again when it is asked for
        if not (self.folder / entry["kernel_path"]).is_file():
            self._report(f"{entry['kernel_path']} is gone")
            return False
        return True

    def _is_whole(self, path: Path) -> bool:
        try:
            read_package(path)
        except PackageError as error:
            self._report(str(error))
            return False
        return True

    def add(self, meta: Any, options: Mapping[str, Any], path: Path) -> None:
        """Remember a library; what it replaces, and what cannot be used, goes."""
        shown = str(path.relative_to(self.folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StatorWarning)
            kept = [entry for entry in self.entries() if entry["kernel_path"] != shown]
        fresh = {
            "meta_info": meta,
            "kernel_path": shown,
            "options": _plain(options),
            "stator": own_version(),
            "torch": torch.__version__,
        }
        text = json.dumps([*kept, fresh], indent=1, sort_keys=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{self.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(name, self.file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the operator's entries, among all processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f".{self.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _report(self, what: str) -> None:
        warnings.warn(f"cached operator {self.name}: {what}", StatorWarning, stacklevel=4)


def _plain(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in sorted(options.items())}
