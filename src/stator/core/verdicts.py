"""Where it is kept what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Verdicts(Protocol):
    """A text for each question, which is some named parts."""

    def find(self, question: Mapping[str, str]) -> str | None:
        """The answer, if there is one."""

    def keep(self, question: Mapping[str, str], answer: str) -> None:
        """For the next time."""
