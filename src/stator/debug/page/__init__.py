"""An explanation as one HTML page, which needs nothing beside itself.

The data travels compressed inside of the page; style and script stand beside this file.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

# In this order: later ones use what earlier ones define.
SCRIPTS: Final = (
    *("build.js", "model.js", "list.js"),
    *("graphs.js", "kernels.js", "memory.js", "main.js"),
)


def page(data: Mapping[str, Any]) -> str:
    """The page of a report."""
    parts = {
        "{style}": _file("page.css"),
        "{script}": "\n".join(map(_file, SCRIPTS)),
        "{data}": packed(data),
    }
    text = _file("page.html")
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def packed(data: Mapping[str, Any]) -> str:
    """Data as letters: compressed, so that it has none that HTML would read."""
    raw = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, mtime=0)).decode()


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
