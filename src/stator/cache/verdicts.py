"""What was measured, kept for other compilations: in memory, and among the entries of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stator.cache.key import Key
from stator.cache.opening import open_store
from stator.cache.store import Store
from stator.options import Options

_found: Final[dict[Key, str]] = {}  # in this process


@dataclass(frozen=True, slots=True)
class StoredVerdicts:
    """Verdicts in a store; without one, for this process alone."""

    store: Store | None

    def find(self, question: Mapping[str, str]) -> str | None:
        """The answer, if there is one."""
        key = Key.of(question)
        if key not in _found and self.store is not None:
            kept = self.store.load(key)
            if kept is not None:
                _found[key] = kept.decode(errors="replace")
        return _found.get(key)

    def keep(self, question: Mapping[str, str], answer: str) -> None:
        """For the next time."""
        key = Key.of(question)
        _found[key] = answer
        if self.store is not None:
            self.store.save(key, answer.encode())


def verdicts_of(options: Options) -> StoredVerdicts:
    """Those that compilations with these options share."""
    try:
        return StoredVerdicts(open_store(options) if options.cache else None)
    except RuntimeError:  # the user has no home
        return StoredVerdicts(None)
