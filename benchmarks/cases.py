"""Every row of every table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, get_args

from benchmarks.case import Case, Kind
from benchmarks.kernels import KERNELS

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


def cases(kinds: Collection[str] = KINDS) -> list[Case]:
    """The rows of some kinds, in the order of their tables."""
    found = list(KERNELS) if "micro" in kinds else []
    if {"infer", "train"} & set(kinds):
        # Here, for transformers are slow to import, and kernels do not need them.
        from benchmarks.models.table import model_cases

        found += model_cases()
    return [case for case in found if case.kind in kinds]


def find(kind: str, name: str) -> Case:
    """The one row of that kind and name."""
    (case,) = (case for case in cases([kind]) if case.name == name)
    return case
