"""The compile cache: what identifies a compilation, and where its results are kept.

    stator.cache.export("programs.zip")    the whole cache of this user, as one file
    stator.cache.import_("programs.zip")   on another machine of the same kind

`import` is a word of Python's, hence the underscore.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stator.cache.key import Key
from stator.cache.store import Store
from stator.options import cache_folder, read_options

if TYPE_CHECKING:
    from stator.cache.archive import Imported

__all__ = ["Key", "Store", "clear", "export", "import_", "store"]


def store() -> Store:
    """The cache that compilations use, unless their options name another."""
    options = read_options()
    return Store(cache_folder(options), options.cache_limit)


def export(path: str | Path, source: Store | None = None) -> int:
    """Write every entry into one file; how many there were."""
    from stator.cache.archive import export_entries  # seldom needed, and a hit must be quick

    return export_entries(source or store(), Path(path))


def import_(path: str | Path, target: Store | None = None) -> Imported:
    """Take in the entries of such a file; how many were kept, and how many were not sound."""
    from stator.cache.archive import import_entries

    return import_entries(target or store(), Path(path))


def clear(target: Store | None = None) -> int:
    """Remove every entry; how many there were."""
    return (target or store()).clear()
