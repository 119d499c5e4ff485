"""The file of a package: a .pt2 archive that torch's own loaders read, whole or not at all.

It is a zip without compression.  The weights begin at a page, so that they are mapped from where
they lie.  The comment at its end has the digest of all bytes but theirs, and the manifest has those
of theirs: what was changed, cut short or added to is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self

from stator.errors import PackageError

FORMAT: Final = 1
ROOT: Final = "package"
MANIFEST: Final = "extra/stator.json"
MODEL: Final = "data/aotinductor/model"
LIBRARY: Final = f"{MODEL}/model.wrapper"  # .so, or object files; torch's loader wants that name
WEIGHTS: Final = f"{LIBRARY}.weights"
PAGE: Final = 4096
CHUNK: Final = 4 << 20  # bytes of weights that have a digest of their own
_COMMENT: Final = re.compile(rb"stator (\d+) (\d{20}) (\d{20}) ([0-9a-f]{64})")
_COMMENT_BYTES: Final = 7 + 1 + 1 + 20 + 1 + 20 + 1 + 64


def write_package(
    path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes], weights: Iterable[Any]
) -> None:
    """Write a package; the same content gives the same bytes."""
    with path.open("w+b") as out:
        _Writer(out).write(manifest, files, weights)


@dataclass(slots=True)
class _Writer:
    out: IO[bytes]

    def write(
        self, manifest: Mapping[str, Any], files: Mapping[str, bytes], weights: Iterable[Any]
    ) -> None:
        size = 0
        with zipfile.ZipFile(self.out, "w", zipfile.ZIP_STORED) as archive:
            self._put(archive, "version", b"3\n")
            self._put(archive, "archive_format", b"pt2")
            self._put(archive, "archive_version", b"0")
            self._put(archive, "byteorder", b"little")
            for name, data in sorted(files.items()):
                self._put(archive, name, data)
            info = self._entry(WEIGHTS, self._padding(len(f"{ROOT}/{WEIGHTS}")))
            with archive.open(info, "w", force_zip64=True) as entry:
                start = self.out.tell()
                with _Digests() as digests:
                    for chunk in _in_chunks(weights):
                        digests.add(chunk)
                        size += len(chunk)
                        entry.write(chunk)
            told = {**manifest, "weights": {"bytes": size, "sha256": digests.found()}}
            text = json.dumps(told, sort_keys=True, indent=1).encode()
            self._put(archive, MANIFEST, text)
            archive.comment = bytes(_COMMENT_BYTES)  # its length is part of what is digested
        self._seal(start, size)

    def _seal(self, start: int, size: int) -> None:
        self.out.flush()
        end = self.out.seek(0, 2) - _COMMENT_BYTES
        digest = _digest_around(self.out, start, size, end)
        self.out.seek(end)
        self.out.write(b"stator %d %020d %020d %s" % (FORMAT, start, size, digest.encode()))

    def _put(self, archive: zipfile.ZipFile, name: str, data: bytes) -> None:
        archive.writestr(self._entry(name), data)

    @staticmethod
    def _entry(name: str, extra: bytes = b"") -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(f"{ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
        info.external_attr = 0o644 << 16
        info.create_system = 3
        info.extra = extra
        return info

    def _padding(self, name: int) -> bytes:
        """A field that nobody reads, so that what follows begins at a page."""
        head = 30 + name + 20 + 4  # of the entry, its sizes in 64 bits, this field
        at = self.out.tell() + head
        return struct.pack("<HH", 0x4246, -at % PAGE) + bytes(-at % PAGE)


class _Digests:
    """Digests of chunks, made by a thread while others are written."""

    AHEAD: Final = 8  # chunks that may wait for it

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.made: list[Future[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()

    def add(self, chunk: bytearray) -> None:
        """Digest a chunk, which stays as it is."""
        self.made.append(self.thread.submit(lambda: hashlib.sha256(chunk).hexdigest()))
        if len(self.made) > self.AHEAD:
            self.made[-self.AHEAD].result()

    def found(self) -> list[str]:
        """All of them, in order."""
        return [digest.result() for digest in self.made]


def _in_chunks(pieces: Iterable[Any]) -> Iterator[bytearray]:
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        at = 0
        while at < len(view):
            taken = min(CHUNK - len(held), len(view) - at)
            held += view[at : at + taken]
            at += taken
            if len(held) == CHUNK:
                yield held
                held = bytearray()
    if held:
        yield held


def _digest_around(file: IO[bytes], start: int, size: int, end: int) -> str:
    """Of all bytes up to `end`, without `size` from `start` on."""
    digest = hashlib.sha256(b"%d %d" % (start, size))
    file.seek(0)
    digest.update(file.read(start))
    file.seek(start + size)
    digest.update(file.read(end - start - size))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was found whole."""

    path: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]
    start: int  # of the weights in the file

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return int(self.manifest["weights"]["bytes"])


def read_package(path: Path, *, checks_weights: bool = True) -> Package:
    """Read a package, after all of it was checked."""
    try:
        with path.open("rb") as file:
            return _read(path, file, checks_weights)
    except OSError as error:
        raise PackageError(path, f"it cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, ValueError, LookupError, struct.error) as error:
        raise PackageError(path, f"it is damaged: {error}") from error


def _read(path: Path, file: IO[bytes], checks_weights: bool) -> Package:
    end = file.seek(0, 2) - _COMMENT_BYTES
    if end < 0:
        raise PackageError(path, "it is too short to be a package")
    file.seek(end)
    found = _COMMENT.fullmatch(file.read())
    if found is None:
        raise PackageError(
            path,
            "it is not a package of stator's, or it is cut short",
            hint="torch's own packages are loaded by torch; build this one again with "
            "stator.aot_compile",
        )
    version, start, size = (int(found[number]) for number in (1, 2, 3))
    if version != FORMAT:
        raise PackageError(
            path,
            f"it is of format {version}, and this stator reads {FORMAT}",
            hint="use the stator that built it, or build it again",
        )
    if start + size > end or _digest_around(file, start, size, end) != found[4].decode():
        raise PackageError(path, "it was changed since it was built", hint="copy or build it again")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        files = {}
        for info in archive.infolist():
            name = _inside(path, info.filename)
            if name != WEIGHTS:
                files[name] = archive.read(info)
    manifest = json.loads(files.pop(MANIFEST))
    package = Package(path, manifest, files, start)
    if package.size != size:
        raise PackageError(path, "its weights are not those that it tells of")
    if checks_weights:
        _check_weights(package)
    return package


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
        with package.path.open("rb", buffering=0) as file:
            file.seek(package.start + number * CHUNK)
            size = min(CHUNK, package.size - number * CHUNK)
            return hashlib.sha256(file.read(size)).hexdigest() == str(digests[number])

    with ThreadPoolExecutor(4) as pool:
        if not all(pool.map(is_good, range(len(digests)))):
            raise PackageError(
                package.path,
                "its weights were changed since it was built",
                hint="copy or build it again",
            )
