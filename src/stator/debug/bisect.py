"""Which rewrite makes a program fail: fewer and fewer of them, until one is left.

The program is a script that fails (any exit status but 0) if its result is wrong.  It runs with
`STATOR_FUEL=n`: only the first n rewrites of each compilation happen.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stator.errors import StatorError
from stator.options import environment_for


@dataclass(frozen=True, slots=True)
class Guilty:
    """The first rewrite with which the program fails."""

    number: int
    rewrites: list[str]  # the one with that number of each compilation that has so many
    runs: int


@dataclass(slots=True)
class Script:
    """A script, run with some of the rewrites."""

    command: Sequence[str]
    runs: int = 0

    def passes(self, fuel: int | None) -> tuple[bool, list[list[str]]]:
        """Whether it ends well with so many rewrites, and what they were."""
        self.runs += 1
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "rewrites.txt")
            done = subprocess.run(
                [sys.executable, *self.command],
                env=environment_for(fuel, log),
                capture_output=True,
                check=False,
            )
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return done.returncode == 0, [line.split("\t") for line in lines]


def bisect(command: Sequence[str], tell: Callable[[int, int], None] | None = None) -> Guilty:
    """Find the guilty rewrite of a script; `tell` hears the range that is left."""
    script = Script(command)
    well, rewrites = script.passes(None)
    if well:
        raise StatorError(
            "the script does not fail", hint="have it exit with an error if a result is wrong"
        )
    if not script.passes(0)[0]:
        raise StatorError(
            "the script fails without any rewrite too",
            hint="the fault is elsewhere: try Options.kernels=False, or eager",
        )
    good, bad = 0, max((int(number) for _, number, _ in rewrites), default=0)
    while bad - good > 1:
        if tell is not None:
            tell(good, bad)
        middle = (good + bad) // 2
        good, bad = (middle, bad) if script.passes(middle)[0] else (good, middle)
    _, rewrites = script.passes(bad)
    named = [f"{label}: {what}" for label, number, what in rewrites if int(number) == bad]
    return Guilty(bad, named, script.runs)
