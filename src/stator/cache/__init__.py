"""The compile cache on disk: what identifies a compilation, and where its results are kept."""

from __future__ import annotations

from stator.cache.archive import export_entries as export
from stator.cache.archive import import_entries as import_
from stator.cache.key import Key
from stator.cache.store import Store

__all__ = ["Key", "Store", "clear", "export", "import_"]


def clear(store: Store) -> int:
    """Remove every entry of the folder; how many there were."""
    return store.clear()
