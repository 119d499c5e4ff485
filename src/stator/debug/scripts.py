"""Explain what a script compiles: it runs in a process of its own, which writes that down.

`python -m stator.debug.scripts FILE SCRIPT ARGUMENTS` is that process.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stator.debug.explain import Explanation, watched
from stator.options import explaining_environment


@dataclass(frozen=True, slots=True)
class Ran:
    """How a script ended, and what it compiled; None if it ended without a word."""

    status: int
    explanation: Explanation | None


def explain_script(command: Sequence[str]) -> Ran:
    """Run a script with its arguments; whatever it compiles with Stator is explained."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "explanation.json")
        done = subprocess.run(
            [sys.executable, "-m", "stator.debug.scripts", str(file), *command],
            env=explaining_environment(),
            check=False,
        )
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return Ran(done.returncode, None if found is None else Explanation(found))


def main() -> None:
    """Run the script as Python would."""
    file, script, *arguments = sys.argv[1:]
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with watched() as seen:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            Path(file).write_text(seen.explanation().json(), encoding="utf-8")


if __name__ == "__main__":
    main()
