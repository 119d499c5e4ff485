"""Entries of the compile cache in a folder: atomic, checksummed, data only.

A file is named after the digest of its key.  It holds a line with the format's version, a line of
JSON (the parts of the key, the length and the checksum of the payload), and the payload.  The same
key and payload give the same bytes, whoever writes them wherever.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar

from stator.cache.key import Key
from stator.cache.remote import Remote

T = TypeVar("T")

MAGIC: Final = b"stator cache entry 1\n"
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TEMPORARY: Final = ".writing-"
_STALE: Final = 3600.0  # seconds until a temporary file counts as left by a writer that died
_COMPARED: Final = 32  # entries that why_missing looks at
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the folder."""

    digest: str
    size: int
    used: int  # when, in nanoseconds since the epoch


@dataclass(slots=True)
class Store:
    """A folder of entries, of at most `limit` bytes in all.

    Nothing here raises: what cannot be read is missing, what cannot be written is not kept, and
    `problem` says why, for the latest time that this happened.  There are no locks: each file
    appears whole, in one step, so threads and processes can share the folder.
    """

    folder: Path
    limit: int
    remote: Remote | None = None
    problem: str | None = None

    def load(self, key: Key) -> bytes | None:
        """The payload kept for `key`, here or at the remote; None if there is none."""
        data = self.read(key.digest)
        if data is None:
            data = self._fetch(key.digest)
        else:
            with suppress(OSError):
                os.utime(self.folder / key.digest)
        return None if data is None else data[_payload_start(data) :]

    def save(self, key: Key, payload: bytes) -> None:
        """Keep `payload` for `key`, here and at the remote; older entries make room."""
        data = _head(key, payload) + payload
        if self.keep(key.digest, data):
            self.trim(newest=key.digest)
        self._ask_remote(lambda remote: remote.save(key.digest, data))

    def why_missing(self, key: Key) -> str:
        """Which parts of `key` differ from the nearest of the entries used last."""
        known = [self._key(entry.digest) for entry in self.entries()[:_COMPARED]]
        # Verdicts of measurements have no part in common with programs.
        differences = [key.differing(o) for o in known if o is not None and key.is_like(o)]
        if not differences:
            return self.problem or "the cache is empty"
        names = min(differences, key=len)
        if not names:
            return "no part differs: the entry was stored since, or it is damaged"
        return f"{', '.join(names)} differ{'s' * (len(names) == 1)} from the nearest entry"

    def entries(self) -> list[Entry]:
        """What is stored, the latest used first."""
        found: list[Entry] = []
        with self._noting(), suppress(FileNotFoundError):
            if self._is_usable():
                found.extend(_entries_in(self.folder))
        return sorted(found, key=lambda entry: (-entry.used, entry.digest))

    def clear(self) -> int:
        """Remove every entry, and what writers left; how many entries.  A remote keeps its own."""
        removed = 0
        for entry in self.entries():
            with self._noting():
                (self.folder / entry.digest).unlink(missing_ok=True)
                removed += 1
        self._remove_leftovers(age=0)
        return removed

    def read(self, digest: str) -> bytes | None:
        """The file of an entry; None if it is not there, or damaged: then it is removed."""
        path = self.folder / digest
        with self._noting(), suppress(FileNotFoundError):
            if self._is_usable():
                data = _read_ours(path, self.limit)
                if data is not None and is_sound(data, digest):
                    return data
                self.problem = f"{path} is damaged, too large or of another version: removed"
                path.unlink()
        return None

    def keep(self, digest: str, data: bytes) -> bool:
        """Write the file of an entry, which must be sound; whether that worked."""
        if len(data) > self.limit:
            self.problem = f"an entry of {len(data)} bytes exceeds the cache's {self.limit}"
            return False
        with self._noting():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_usable():
                with replacing(self.folder / digest) as file:
                    file.write(data)
                return True
        return False

    def trim(self, newest: str = "") -> None:
        """Remove the least recently used entries until the rest fit; `newest` goes last."""
        total = 0
        with self._noting():
            for entry in sorted(self.entries(), key=lambda entry: entry.digest != newest):
                total += entry.size
                if total > self.limit:
                    (self.folder / entry.digest).unlink(missing_ok=True)
        self._remove_leftovers(age=_STALE)

    def _fetch(self, digest: str) -> bytes | None:
        """The file of an entry from the remote, kept here from now on."""
        data = self._ask_remote(lambda remote: remote.load(digest))
        if data is None:
            return None
        if not is_sound(data, digest):
            self.problem = f"the remote cache's entry {digest} is damaged or of another version"
            return None
        if self.keep(digest, data):
            self.trim(newest=digest)
        return data

    def _ask_remote(self, request: Callable[[Remote], T]) -> T | None:
        """The answer of the remote, if there is one; a failure of its is one of ours."""
        if self.remote is None:
            return None
        before = self.remote.failures
        answer = request(self.remote)
        if self.remote.failures > before:
            self.problem = self.remote.problem
        return answer

    def _key(self, digest: str) -> Key | None:
        with (
            self._noting(),
            suppress(FileNotFoundError),
            open(self.folder / digest, "rb", opener=_open_plainly) as file,
        ):
            return _key_in(file.readline() + file.readline())
        return None

    def _remove_leftovers(self, age: float) -> None:
        with self._noting(), suppress(FileNotFoundError):
            if self._is_usable():
                for path in self.folder.glob(f"{_TEMPORARY}*"):
                    with suppress(FileNotFoundError):  # another process was faster
                        if path.lstat().st_mtime <= time.time() - age:
                            path.unlink()

    def _is_usable(self) -> bool:
        reason = why_not_ours(self.folder)
        self.problem = reason or self.problem
        return reason is None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Let no failure out: a compilation does not need the cache."""
        try:
            yield
        except (OSError, ValueError, MemoryError) as error:  # ValueError: a path with a NUL in it
            self.problem = f"the cache in {self.folder} failed: {type(error).__name__}: {error}"


def is_sound(data: bytes, digest: str) -> bool:
    """Are these, to the last bit, the bytes that `save` writes for the key with this digest?"""
    start = _payload_start(data)
    head = data[:start]
    key = _key_in(head)
    return key is not None and key.digest == digest and head == _head(key, data[start:])


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of `path` once it is whole; on failure, nothing changes.

    It does not wait for the disk: an entry that a power cut tears fails its checksum.
    """
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _head(key: Key, payload: bytes) -> bytes:
    """All that stands before the payload."""
    checksum = hashlib.sha256(payload).hexdigest()
    header = {"key": dict(key.parts), "length": len(payload), "sha256": checksum}
    return MAGIC + json.dumps(header, sort_keys=True).encode("ascii") + b"\n"


def _payload_start(data: bytes) -> int:
    return data.find(b"\n", len(MAGIC)) + 1


def _key_in(head: bytes) -> Key | None:
    """The key that a head names; None if it is none of ours."""
    if not head.startswith(MAGIC):
        return None
    with suppress(ValueError, RecursionError):  # not JSON; JSON nested without end
        match json.loads(head[len(MAGIC) :]):
            case {"key": dict(parts)} if all(isinstance(text, str) for text in parts.values()):
                return Key.of(parts)
    return None


def _entries_in(folder: Path) -> Iterator[Entry]:
    with os.scandir(folder) as files:
        for file in files:
            if DIGEST.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process was faster
                    status = file.stat(follow_symlinks=False)
                    yield Entry(file.name, status.st_size, status.st_mtime_ns)


def _open_plainly(path: str, flags: int) -> int:
    """Open a file; a link that somebody planted is not followed, a pipe does not hang."""
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags | extra)


def _read_ours(path: Path, limit: int) -> bytes | None:
    """The bytes of a file, if it is this user's and not over the limit."""
    with open(path, "rb", opener=_open_plainly) as file:
        status = os.fstat(file.fileno())
        ours = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        return file.read() if ours and status.st_size <= limit else None


def why_not_ours(folder: Path) -> str | None:
    """None if only this user can write into `folder`; otherwise the reason.

    What is loaded becomes code that runs.  A folder of ours that is merely too open is tightened,
    except one with the sticky bit, which is shared on purpose.
    """
    link, status = os.lstat(folder), os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a directory"
    if not hasattr(os, "getuid"):
        return None  # a system without owners and modes
    if {link.st_uid, status.st_uid} != {os.getuid()}:
        return f"{folder} belongs to another user"
    if status.st_mode & _OTHERS_WRITE:
        if not status.st_mode & stat.S_ISVTX:
            os.chmod(folder, stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
            status = os.stat(folder)
        if status.st_mode & _OTHERS_WRITE:  # some filesystems keep no modes
            return f"others may write into {folder}"
    return None
