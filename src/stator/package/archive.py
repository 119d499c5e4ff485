"""The file of a package: a .pt2 archive that torch's own loaders read, whole or not at all.

It is a zip without compression.  The weights begin at a page, so that they are mapped from where
they lie.  The comment at its end has the digest of all bytes but theirs, and the manifest has those
of theirs: what was changed, cut short or added to is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self

from stator.errors import PackageError

FORMAT: Final = 1
ROOT: Final = "package"
MANIFEST: Final = "extra/stator.json"
MODEL: Final = "data/aotinductor/model"
LIBRARY: Final = f"{MODEL}/model.wrapper"  # .so, or object files; torch's loader wants that name
WEIGHTS: Final = f"{LIBRARY}.weights"
# Of a package for training: what its wrappers need to know, and its two libraries.
FACTS: Final = "extra/facts"
STEMS: Final = {"forward": "data/stator/forward", "backward": "data/stator/backward"}
# What a library needs, by the kind of device that it is for.
NEEDED: Final = {
    "cpu": ("libtorch_cpu.so",),
    "cuda": ("libtorch_cpu.so", "libtorch_cuda.so", "libcuda.so.1"),
}
PAGE: Final = 4096
CHUNK: Final = 4 << 20  # bytes of weights that have a digest of their own
_HEAD: Final = {  # what torch's loaders read first
    "version": b"3\n",
    "archive_format": b"pt2",
    "archive_version": b"0",
    "byteorder": b"little",
}
_COMMENT: Final = re.compile(rb"stator (\d+) (\d{20}) (\d{20}) ([0-9a-f]{64})\Z")
_COMMENT_BYTES: Final = 7 + 1 + 1 + 20 + 1 + 20 + 1 + 64
_ENCRYPTED: Final = 1  # a flag of entries
# What reading comes to where a file is no archive, or its manifest is not what it should be.
_DAMAGE: Final = (
    *(zipfile.BadZipFile, struct.error, ValueError, LookupError),
    *(TypeError, AttributeError, RecursionError),
)


def own_version() -> str:
    """Which Stator this is."""
    try:
        return version("stator")
    except PackageNotFoundError:  # it is on the path, as it lies in its repository
        return "not installed"


def write_package(
    path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes], weights: Iterable[Any]
) -> None:
    """Write a package; the same content gives the same bytes."""
    with PackageWriter(path) as package:
        for piece in weights:
            package.put(piece)
        package.finish(manifest, files)


class PackageWriter:
    """Writes a package, its weights first: threads write and digest them while others compile.

    Nothing is copied: what was put stays as it is until all is written.
    """

    def __init__(self, path: Path) -> None:
        self._size = 0
        self._pending: list[Future[Any]] = []
        self._digests: list[Any] = []  # one for each chunk
        with ExitStack() as stack:
            self._out = stack.enter_context(path.open("w+b"))
            self._archive = stack.enter_context(zipfile.ZipFile(self._out, "w"))
            for name, data in _HEAD.items():
                self._archive.writestr(_entry(name), data)
            info = _entry(WEIGHTS, self._padding(len(f"{ROOT}/{WEIGHTS}")))
            entry = self._archive.open(info, "w", force_zip64=True)
            self._weights = stack.enter_context(entry)
            self._start = self._out.tell()
            self._threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
            stack.callback(self._stop)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def put(self, piece: Any) -> None:
        """Weights, which go behind those that were put before."""
        view = memoryview(piece).cast("B")
        writing, digesting = self._threads
        self._pending.append(writing.submit(self._weights.write, view))
        while view:
            if self._size % CHUNK == 0:
                self._digests.append(hashlib.sha256())
            room = CHUNK - self._size % CHUNK
            part, view = view[:room], view[room:]
            self._pending.append(digesting.submit(self._digests[-1].update, part))
            self._size += len(part)

    def finish(self, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """All else, once the weights are there."""
        for done in self._pending:
            done.result()
        self._weights.close()
        for name, data in sorted(files.items()):
            self._archive.writestr(_entry(name), data)
        digests = [digest.hexdigest() for digest in self._digests]
        told = {**manifest, "weights": {"bytes": self._size, "sha256": digests}}
        text = json.dumps(told, sort_keys=True, indent=1).encode()
        self._archive.writestr(_entry(MANIFEST), text)
        self._archive.comment = bytes(_COMMENT_BYTES)  # its length is part of what is digested
        self._archive.close()
        self._seal()

    def _stop(self) -> None:
        """Let go of what was not written yet, where something failed."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def _seal(self) -> None:
        self._out.flush()
        end = self._out.seek(0, 2) - _COMMENT_BYTES
        digest = _digest_around(self._out, self._start, self._size, end)
        self._out.seek(end)
        told = (FORMAT, self._start, self._size, digest.encode())
        self._out.write(b"stator %d %020d %020d %s" % told)

    def _padding(self, name: int) -> bytes:
        """A field that nobody reads, so that what follows begins at a page."""
        head = 30 + name + 20 + 4  # of the entry, its sizes in 64 bits, this field
        at = self._out.tell() + head
        return struct.pack("<HH", 0x4246, -at % PAGE) + bytes(-at % PAGE)


def _entry(name: str, extra: bytes = b"") -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(f"{ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    info.create_system = 3
    info.extra = extra
    return info


def _digest_around(file: IO[bytes], start: int, size: int, end: int) -> str:
    """Of all bytes up to `end`, without `size` from `start` on."""
    digest = hashlib.sha256(b"%d %d" % (start, size))
    file.seek(0)
    digest.update(file.read(start))
    file.seek(start + size)
    digest.update(file.read(end - start - size))
    return digest.hexdigest()


class OpenFile:
    """A file that stays the one that was checked, whatever its name comes to stand for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        number = self.__dict__.pop("number", None)
        if number is not None:
            os.close(number)

    def read(self, start: int, size: int) -> bytearray:
        """Some of its bytes, in whichever thread."""
        data = bytearray(size)
        done = 0
        while done < size:
            count = os.preadv(self.number, [memoryview(data)[done:]], start + done)
            if not count:
                raise PackageError(self.path, "it is cut short")
            done += count
        return data


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was found whole."""

    path: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]
    file: OpenFile
    start: int  # of the weights in the file

    @property
    def made_for(self) -> str:
        """The device, for people."""
        if self.manifest["device"] == "cpu":
            return "CPU"
        major, minor = divmod(int(self.manifest["capability"]), 10)
        return f"GPU of compute capability {major}.{minor}"

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return int(self.manifest["weights"]["bytes"])


def read_package(path: Path, *, checks_weights: bool = True) -> Package:
    """Read a package, after all of it was checked."""
    try:
        return _read(path, OpenFile(path), checks_weights)
    except OSError as error:
        raise PackageError(path, f"it cannot be read: {error.strerror}") from error
    except _DAMAGE as error:
        raise PackageError(path, f"it is damaged: {error}") from error


def _read(path: Path, whole: OpenFile, checks_weights: bool) -> Package:
    with os.fdopen(os.dup(whole.number), "rb") as file:
        start, size = _checked(path, file)
        files = _entries(path, file)
    manifest = json.loads(files.pop(MANIFEST))
    package = Package(path, manifest, files, whole, start)
    if package.size != size:
        raise PackageError(path, "its weights are not those that it tells of")
    if checks_weights:
        _check_weights(package)
    return package


def _checked(path: Path, file: IO[bytes]) -> tuple[int, int]:
    """Where the weights of a file begin, and their bytes, once all else is what was written."""
    end = file.seek(0, 2) - _COMMENT_BYTES
    if end < 0:
        raise PackageError(path, "it is too short to be a package")
    file.seek(max(0, end - 8))  # a format of more digits is told as such
    found = _COMMENT.search(file.read())
    if found is None:
        raise PackageError(
            path,
            "it is not a package of stator's, or it is cut short",
            hint="torch's own packages are loaded by torch; build this one again with "
            "stator.aot_compile",
        )
    form, start, size = (int(found[number]) for number in (1, 2, 3))
    if form != FORMAT:
        raise PackageError(
            path,
            f"it is of format {form}, and this stator reads {FORMAT}",
            hint="use the stator that built it, or build it again",
        )
    if start + size > end or _digest_around(file, start, size, end) != found[4].decode():
        raise PackageError(path, "it was changed since it was built", hint="copy or build it again")
    return start, size


def _entries(path: Path, file: IO[bytes]) -> dict[str, bytes]:
    """All of an archive but the weights, by name."""
    files = {}
    length = file.seek(0, 2)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = _inside(path, info.filename)
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
                raise PackageError(path, f"{name} is packed or encrypted, as no entry of ours is")
            length -= info.file_size
            if name in files or length < 0:
                raise PackageError(path, f"{name} is there twice, or longer than the file")
            files[name] = b"" if name == WEIGHTS else archive.read(info)
    del files[WEIGHTS]
    return files


def _inside(path: Path, name: str) -> str:
    """A name within the archive's root."""
    parts = PurePosixPath(name)
    if ".." in parts.parts or parts.parts[:1] != (ROOT,) or str(parts) != name or "\\" in name:
        raise PackageError(path, f"it has an entry that points outside: {name!r}")
    return str(parts.relative_to(ROOT))


def _check_weights(package: Package) -> None:
    digests = package.manifest["weights"]["sha256"]
    if len(digests) != -(-package.size // CHUNK):
        raise PackageError(package.path, "its weights are not those that it tells of")

    def is_good(number: int) -> bool:
        size = min(CHUNK, package.size - number * CHUNK)
        data = package.file.read(package.start + number * CHUNK, size)
        return hashlib.sha256(data).hexdigest() == str(digests[number])

    with ThreadPoolExecutor(4) as pool:
        if not all(pool.map(is_good, range(len(digests)))):
            raise PackageError(
                package.path,
                "its weights were changed since it was built",
                hint="copy or build it again",
            )
