"""Fuel: count rewrites, stop after a number of them, find a wrong one by bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Fuel:
    """How many rewrites may still fire.  `left=None` never runs dry."""

    left: int | None = None
    spent: list[str] = field(default_factory=list)
    log: Path | None = None  # where each is written down, for whoever runs the program
    label: str = ""  # what it is spent on, in the log

    def spend(self, what: str) -> bool:
        """Take one unit for the rewrite `what`; False when there is none left."""
        if self.left is not None:
            if self.left == 0:
                return False
            self.left -= 1
        self.spent.append(what)
        self.note(str(len(self.spent)), what)
        return True

    def note(self, key: str, what: str) -> None:
        """Write something more into the log, if there is one."""
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{self.label}\t{key}\t{what}\n")
