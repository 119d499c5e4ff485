"""Where measurements are written down: sections of RESULTS.md, one for each benchmark."""

import os
import platform
import re
from pathlib import Path
from typing import Final

import torch

RESULTS: Final = Path(__file__).with_name("RESULTS.md")


def write_section(name: str, body: str, file: Path = RESULTS) -> None:
    """Put `body` between the markers of section `name`; the other sections stay as they are."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{begin}\n{body.strip()}\n{end}"
    text = file.read_text(encoding="utf-8")
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"{file.name} has no section {begin} … {end}")
    file.write_text(marked.sub(lambda _: section, text), encoding="utf-8")


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def conditions() -> str:
    """What the numbers depend on, besides the code."""
    vectors = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.system()} {platform.machine()} ({vectors})"
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {machine}, {cores}"
