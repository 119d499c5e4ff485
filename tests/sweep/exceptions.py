"""The reviewed list of cases that pass with the peer and not with us, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from tests.sweep.cases import Unit

LARGEST_SHARE: Final = 0.005  # of all cases


@dataclass(frozen=True, slots=True)
class Known:
    """Units that may fail, by shell patterns, and why."""

    op: str
    reason: str
    dtype: str = "*"
    direction: str = "*"

    def covers(self, unit: Unit) -> bool:
        """Whether a failure of the unit is one of these."""
        return (
            fnmatchcase(unit.op, self.op)
            and fnmatchcase(unit.dtype, self.dtype)
            and fnmatchcase(unit.direction, self.direction)
        )


KNOWN: Final[tuple[Known, ...]] = ()


def reason_for(unit: Unit) -> str | None:
    """Why the unit is allowed to fail; None when it is not."""
    return next((known.reason for known in KNOWN if known.covers(unit)), None)
