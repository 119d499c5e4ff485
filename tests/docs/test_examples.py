"""Examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tests

EXAMPLES = Path(tests.__file__).parents[1] / "examples"


def test_a_step_fits_in_the_limit_of_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "memory.py")], capture_output=True, text=True, check=True
    )

    assert "MiB at the peak" in done.stdout
    assert "under a limit of 34 MiB a step holds at most" in done.stdout
    held = float(done.stdout.rsplit("at most", 1)[1].split()[0])
    assert held <= 34
