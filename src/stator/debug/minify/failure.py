"""What is wrong with a compiled graph, and when two such findings are the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

KINDS: Final = ("crash", "hang", "dtype", "size", "stride", "accuracy")


@dataclass(frozen=True, slots=True)
class Failure:
    """A finding.  Two are equal if a smaller graph with the one may stand for the other."""

    kind: str
    message: str = ""  # of a crash: what was raised, without numbers and names
    dynamic: bool = False  # only if sizes are symbols
    detail: str = field(default="", compare=False)

    def __str__(self) -> str:
        words = f"{self.kind} with symbolic sizes only" if self.dynamic else self.kind
        return f"{words}: {self.detail}" if self.detail else words

    def stored(self) -> dict[str, Any]:
        """As data."""
        return asdict(self)

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Failure:
        """What `stored` gave."""
        return Failure(**stored)


def crash(error: BaseException) -> Failure:
    """The finding that something was raised."""
    text = f"{type(error).__name__}: {error}"
    return Failure("crash", normalised(text), detail=text.partition("\n")[0])


def normalised(text: str) -> str:
    """A message without what differs from graph to graph: numbers, lists of them, addresses."""
    line = text.partition("\n")[0]
    line = re.sub(r"0x[0-9a-fA-F]+", "#", line)
    line = re.sub(r"\b([A-Za-z_]\w*?)(?:_\d+)+\b", r"\1", line)  # of nodes: add_3 and add are one
    line = re.sub(r"\b[suz]\d+\b", "#", line)  # symbols for sizes
    line = re.sub(r"-?\b\d+(?:\.\d+)?\b", "#", line)
    return re.sub(r"#(?:\s*[,x×*]\s*#)+", "#", line)
