"""The store that options name."""

from __future__ import annotations

from stator.cache.remote import Remote
from stator.cache.store import Store
from stator.options import Options, cache_folder


def open_store(options: Options) -> Store:
    """The store that the options name."""
    remote = None if options.remote_cache is None else _remote(options.remote_cache)
    return Store(cache_folder(options), options.cache_limit, remote)


_remotes: dict[str, Remote] = {}  # one for each URL: it remembers whether it answers


def _remote(url: str) -> Remote:
    return _remotes.setdefault(url, Remote(url))
