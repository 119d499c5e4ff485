"""Fuel: count rewrites, stop after a number of them, find a wrong one by bisection."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Fuel:
    """How many rewrites may still fire.  `left=None` never runs dry."""

    left: int | None = None
    spent: list[str] = field(default_factory=list)

    def spend(self, what: str) -> bool:
        """Take one unit for the rewrite `what`; False when there is none left."""
        if self.left is not None:
            if self.left == 0:
                return False
            self.left -= 1
        self.spent.append(what)
        return True
