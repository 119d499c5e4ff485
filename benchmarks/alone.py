"""Measurements in a process of their own: it leaves a text in a file, or a log that says why not.

So compilers' caches, memory and the allocator's mood do not pass from one to the next.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
MOST_SECONDS: Final = 1800  # compilers included


class DiedError(Exception):
    """What became of a process that left nothing, in words."""


def run_alone(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run Python with such arguments; all that it says goes to the log."""
    try:
        with log.open("w", encoding="utf-8") as output:
            status = subprocess.run(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=MOST_SECONDS,
                check=False,
                cwd=ROOT,
            ).returncode
    except subprocess.TimeoutExpired as error:
        raise DiedError(f"took more than {MOST_SECONDS} s") from error
    if status:
        raise DiedError(why_died(status, log))


def left_by(
    code: str, names: Sequence[str], options: Sequence[str], environment: Mapping[str, str]
) -> str:
    """What a process leaves in the file that it is given after its names."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "left.json")
        run_alone(["-c", code, *names, str(file), *options], environment, Path(folder, "log.txt"))
        return file.read_text(encoding="utf-8")


def why_died(status: int, log: Path) -> str:
    """In words: the last line of the log, which is an error, or what was going on at a signal."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines()]
    last = next(filter(None, reversed(lines)), f"exit status {status}")[:300]
    return f"died of {signal.Signals(-status).name} after: {last}" if status < 0 else last
