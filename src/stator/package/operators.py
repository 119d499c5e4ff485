"""Compiled operators on disk, each entry for one kind of arguments.

    <cache>/aoti_eager/<namespace>/<device>/<operator>.json             a list of entries
    <cache>/aoti_eager/<namespace>/<device>/lib/<operator>.<key>.pt2    what they name

Entries do not depend on each other: one that is damaged or whose library is gone is left out, with
a warning, and replaced when it is compiled again.  Those of another version stay beside ours, for a
while; a library that no entry names goes.  Which library is loaded follows from its key, never from
what a list says, and only from a folder that is the user's alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from stator.cache.fingerprint import own_code
from stator.cache.store import replacing, why_not_ours
from stator.errors import PackageError, StatorWarning
from stator.package.archive import own_version, read_package
from stator.torch_api import dispatch_keys

OTHERS_STAY: Final = 30 * 86400.0  # seconds that another version's kernels are kept
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

    def library(self, meta: Any, options: Mapping[str, Any]) -> Path:
        """Where a library is: its name tells what it is for, and who made it."""
        parts = [self.name, meta, _plain(options), _makers(), str(torch.get_default_dtype())]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
        return self.folder / "lib" / f"{self.name}.{key}.pt2"

    def find(self, meta: Any, options: Mapping[str, Any]) -> Path | None:
        """The library for such arguments."""
        path = self.library(meta, options)
        if not path.parent.exists():
            return None
        self._check_owner()
        named = any(entry["kernel_path"] == self._shown(path) for entry in self.entries())
        return path if named and self._is_whole(path) else None

    def entries(self) -> list[dict[str, Any]]:
        """All that can be read."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            if not _is_users(self.file):
                self._report("its list belongs to another user")
                return []
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._report(f"its list cannot be read: {error}")
            return []
        if not isinstance(found, list):
            self._report("its list is none")
            return []
        return [entry for entry in found if self._is_entry(entry)]

    def _is_entry(self, entry: Any) -> bool:
        is_entry = isinstance(entry, dict) and isinstance(entry.get("meta_info"), list)
        if not is_entry or not isinstance(entry.get("kernel_path"), str):
            self._report("an entry is damaged")
            return False
        return True

    def _is_whole(self, path: Path) -> bool:
        try:
            read_package(path)
        except PackageError as error:
            self._report(f"{self._shown(path)} is left out: {error}")
            return False
        if not _is_users(path):
            self._report(f"{self._shown(path)} belongs to another user")
            return False
        return True

    def add(self, meta: Any, options: Mapping[str, Any], path: Path) -> None:
        """Remember a library that was written; what cannot be used goes."""
        fresh: dict[str, Any] = {
            "meta_info": meta,
            "kernel_path": self._shown(path),
            "options": _plain(options),
            "default_dtype": str(torch.get_default_dtype()),
            **_makers(),
        }
        there = {self._shown(path): path for path in self._libraries()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StatorWarning)
            found = {entry["kernel_path"]: entry for entry in self.entries()}
        found[fresh["kernel_path"]] = fresh
        kept = {
            shown: entry
            for shown, entry in found.items()
            if shown in there and (_is_ours(entry) or _is_young(there[shown]))
        }
        text = json.dumps(list(kept.values()), indent=1, sort_keys=True)
        with replacing(self.file) as out:
            out.write(text.encode())
        for shown in there.keys() - kept.keys():
            there[shown].unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the operator's entries, among all processes."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / "lib").mkdir(mode=0o700, exist_ok=True)
        self._check_owner()
        with (self.folder / f".{self.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _check_owner(self) -> None:
        """What is loaded becomes code that runs: nobody else may have written it."""
        for path in (self.folder, self.folder / "lib"):
            reason = why_not_ours(path)
            if reason is not None:
                hint = "give another folder as the option cache_dir"
                raise PackageError(path, f"cached operators are not used: {reason}", hint=hint)

    def _libraries(self) -> list[Path]:
        return list((self.folder / "lib").glob(f"{self.name}.{'?' * 32}.pt2"))

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _report(self, what: str) -> None:
        warnings.warn(f"cached operator {self.name}: {what}", StatorWarning, stacklevel=4)


def _makers() -> dict[str, str]:
    """Who makes libraries here."""
    return {"stator": own_version(), "code": own_code(), "torch": torch.__version__}


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return all(entry.get(name) == value for name, value in _makers().items())


def _is_users(path: Path) -> bool:
    """Whether the user wrote a file: others may have been let into the folder before."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _is_young(path: Path) -> bool:
    return path.stat().st_mtime > time.time() - OTHERS_STAY


def _plain(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as text, but for where the cache is: a folder may be moved."""
    return {name: repr(options[name]) for name in sorted(options) if name != "cache_dir"}
