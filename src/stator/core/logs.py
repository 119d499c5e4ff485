"""What the compiler does, to Python's logging: one logger a subject, `stator.fusion` and so on.

They are silent until somebody sets a level, or names them in STATOR_LOGS or Options.logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from stator.options import LOGS


def logger(subject: str) -> logging.Logger:
    """The logger of a subject."""
    assert subject in LOGS, f"{subject} is not a subject of the log"
    return logging.getLogger(f"stator.{subject}")


def turn_on(subjects: Iterable[str]) -> None:
    """Write these subjects to stderr, unless the program has told logging where to write."""
    for subject in subjects:
        logger(subject).setLevel(logging.DEBUG)
    root = logging.getLogger("stator")
    if not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)
