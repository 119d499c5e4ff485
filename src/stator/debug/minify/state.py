"""Where a search stands, in a folder: whoever starts it again goes on from there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stator.debug.minify.case import Case
from stator.debug.minify.failure import Failure
from stator.debug.minify.judge import How
from stator.debug.minify.script import read_script, write_script


@dataclass(frozen=True, slots=True)
class State:
    """A folder with the smallest case so far, as a script, and what is known of the search."""

    folder: Path

    @property
    def exists(self) -> bool:
        """Whether a search was begun here."""
        return self._file.exists()

    @property
    def _file(self) -> Path:
        return self.folder / "state.json"

    def save(self, case: Case, failure: Failure, how: How, begun: int) -> None:
        """Write a success down; at every moment there is a whole one."""
        number = self._told().get("number", 0) + 1 if self.exists else 0
        write_script(self.folder / f"round_{number % 2}", case, failure, how)
        told = {"number": number, "begun": begun, "failure": failure.stored()}
        partial = self._file.with_suffix(".new")
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.replace(self._file)

    def load(self) -> tuple[Case, Failure, How, int]:
        """The smallest case, how it fails, and how many nodes it had at the beginning."""
        told = self._told()
        scripted = read_script(self.folder / f"round_{told['number'] % 2}" / "repro.py")
        return scripted.case, Failure.read(told["failure"]), scripted.how, told["begun"]

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        return told
