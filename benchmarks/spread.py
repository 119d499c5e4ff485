"""The middle of some measurements, between their quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median between its quartiles.  Written `1.10 (1.05–1.20)`; a format is of each number."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of `values`; of a single one, itself."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
        """The quartiles of ratios taken round by round."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])

    def __format__(self, form: str) -> str:
        form = form or ".1f"
        return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"

    def __str__(self) -> str:
        return format(self)
