"""Where the texts of a compilation go: one folder each, for people who look inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stator.errors import OptionError


@dataclass(frozen=True, slots=True)
class Dump:
    """A folder for texts; without one nothing is written, and no text is made."""

    folder: Path | None = None

    def write(self, file: str, text: Callable[[], str]) -> None:
        """Write one file; the folder is made on the way."""
        if self.folder is None:
            return
        content, path = text(), self.folder / file.replace("/", "_")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(content.rstrip("\n") + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"the dump cannot be written: {error.strerror or error}",
                where=str(path),
                hint="name a folder that can be written to in Options.dump_dir or STATOR_DUMP, "
                "or leave both out",
            ) from error
