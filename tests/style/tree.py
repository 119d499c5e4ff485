"""The files of the repository, as the style tests see them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "src" / "stator"
CODE_FOLDERS: Final = ("src", "tests", "benchmarks", "examples", "docs")
TEXT_FOLDERS: Final = (*CODE_FOLDERS, ".ci")
# Made by tools inside the folders above, never committed.
MADE_BY_TOOLS: Final = ("__pycache__", ".egg-info")
# Everything else in the repository is text.
BINARY: Final = frozenset({".png", ".gif", ".jpg", ".pt2", ".so"})


def files_under(folder: Path, pattern: str) -> Iterator[Path]:
    """Files below `folder` that a person wrote."""
    for path in sorted(folder.rglob(pattern)):
        written = not any(part.endswith(MADE_BY_TOOLS) for part in path.parts)
        if path.is_file() and written:
            yield path


def code_files() -> list[Path]:
    """Every Python file of the repository."""
    return [path for name in CODE_FOLDERS for path in files_under(ROOT / name, "*.py")]


def package_files() -> list[Path]:
    """Every Python file of the package itself."""
    return list(files_under(PACKAGE, "*.py"))


def text_files() -> list[Path]:
    """Every text file of the repository, those at its root included."""
    at_root = [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    below = [path for name in TEXT_FOLDERS for path in files_under(ROOT / name, "*")]
    return [path for path in at_root + below if path.suffix not in BINARY]


def markdown_files() -> list[Path]:
    """Every Markdown file of the repository."""
    return [path for path in text_files() if path.suffix == ".md"]


def shown(path: Path) -> str:
    """`path` as a reader would write it, from the root."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; read once, since several tests walk it."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
