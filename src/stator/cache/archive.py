"""A whole cache as one file, to carry to another machine: a plain zip, nothing compressed."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stator.cache.store import DIGEST, Store, is_sound, replacing
from stator.errors import StatorError

_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold
_UNIX: Final = 3

# What zipfile raises for a damaged file; NotImplementedError, a RuntimeError, is among them.
_UNREADABLE: Final = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    RuntimeError,
    struct.error,
)


class ArchiveError(StatorError):
    """A file of cache entries that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Imported:
    """How many entries of an archive were kept, and how many were damaged or did not fit."""

    kept: int
    skipped: int


def export_entries(store: Store, path: Path) -> int:
    """Write every entry into one file; how many.  The same entries give the same bytes."""
    count = 0
    try:
        with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
            for digest in sorted(entry.digest for entry in store.entries()):
                data = store.read(digest)
                if data is not None:
                    member = zipfile.ZipInfo(digest, _DATE)
                    member.create_system = _UNIX
                    archive.writestr(member, data)
                    count += 1
    except OSError as error:
        raise ArchiveError(
            f"the cache cannot be exported: {error.strerror or error}",
            where=str(path),
            hint="name a file in a folder that can be written to",
        ) from error
    return count


def import_entries(store: Store, path: Path) -> Imported:
    """Add the sound entries of an exported file; the rest is skipped.

    Compiled entries are code that will run: import only files from people you trust.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            kept = [_import_member(store, archive, member) for member in archive.infolist()]
    except _UNREADABLE as error:
        raise ArchiveError(
            f"the cache cannot be imported: {error}",
            where=str(path),
            hint="give a file that stator.cache.export wrote",
        ) from error
    store.trim()
    return Imported(kept=kept.count(True), skipped=kept.count(False))


def _import_member(store: Store, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Whether the member is a sound entry, and was kept.  Its name becomes a file's: only hex."""
    digest, plain = member.filename, member.compress_type == zipfile.ZIP_STORED
    if not DIGEST.fullmatch(digest) or not plain or member.file_size > store.limit:
        return False
    try:
        data = archive.read(member)
    except _UNREADABLE:
        return False
    return is_sound(data, digest) and store.keep(digest, data)
