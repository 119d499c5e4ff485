"""What identifies a compilation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """Named parts, each a digest or a short text; made by `Key.of`."""

    parts: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        ordered = sorted(dict(self.parts).items())
        assert list(self.parts) == ordered, "parts are not in order of their names: use Key.of"

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Key:
        """The key of these parts, in whatever order they come."""
        return cls(tuple(sorted(parts.items())))

    @property
    def digest(self) -> str:
        """SHA-256 of all parts, in hexadecimal; JSON keeps one from running into the next."""
        return hashlib.sha256(json.dumps(self.parts).encode("ascii")).hexdigest()

    def is_like(self, other: Key) -> bool:
        """Whether some part of both has the same name."""
        return not dict(self.parts).keys().isdisjoint(dict(other.parts))

    def differing(self, other: Key) -> tuple[str, ...]:
        """Names of the parts that are not the same in both, those that one lacks included."""
        ours, theirs = dict(self.parts), dict(other.parts)
        names = sorted(ours.keys() | theirs.keys())
        return tuple(name for name in names if ours.get(name) != theirs.get(name))
