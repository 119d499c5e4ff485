"""What the backwards of a script keep: it runs in a process of its own, which writes them down.

`python -m stator.debug.choices FILE SCRIPT ARGUMENTS` is that process.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stator.aot.partition.report import Choices, Point, Value
from stator.core.events import collected_records
from stator.options import environment_for


@dataclass(frozen=True, slots=True)
class Ran:
    """How a script ended, and what its programs chose."""

    status: int
    choices: tuple[Choices, ...]


def choices_of(command: Sequence[str]) -> Ran:
    """Run a script with its arguments; whatever it compiles is explained."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "choices.json")
        environment = environment_for(None, Path(folder, "rewrites.txt"))
        done = subprocess.run(
            [sys.executable, "-m", "stator.debug.choices", str(file), *command],
            env={**environment, "STATOR_EXPLAIN_MEMORY": "1"},
            check=False,
        )
        found = read(file.read_text(encoding="utf-8")) if file.exists() else ()
    return Ran(done.returncode, found)


def written(choices: Sequence[Choices]) -> str:
    """Choices as they travel from one process to another."""
    return json.dumps([asdict(one) for one in choices])


def read(text: str) -> tuple[Choices, ...]:
    """Choices as they arrive."""
    return tuple(_choices(**one) for one in json.loads(text))


def _choices(**stored: Any) -> Choices:
    return Choices(
        stored["inputs"],
        tuple(Point(**point) for point in stored["points"]),
        Point(**stored["chosen"]),
        tuple(Value(**value) for value in stored["values"]),
        tuple(stored["holders"]),
    )


@contextmanager
def _written_to(file: Path) -> Iterator[None]:
    """What is compiled meanwhile is written down, however that ends."""
    with collected_records() as records:
        try:
            yield
        finally:
            chosen = [record.choices for record in records if record.choices is not None]
            file.write_text(written(chosen), encoding="utf-8")


def main() -> None:
    """Run the script as Python would."""
    file, script, *arguments = sys.argv[1:]
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with _written_to(Path(file)):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
