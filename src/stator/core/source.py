"""Generated Python: small functions with names bound to objects, visible in tracebacks."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

_LITERALS = (bool, int, str, type(None))


@dataclass(slots=True)
class Source:
    """Lines of a Python module, and the objects that its names stand for."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    _bound: dict[int, str] = field(default_factory=dict)
    _within: int = 0  # blocks that are open

    def add(self, line: str, depth: int = 1) -> None:
        """Append a line, indented by `depth` steps."""
        self.lines.append("    " * (depth + self._within) + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """What is added inside stands within a block that begins with `head`."""
        self.add(head)
        self._within += 1
        yield
        self._within -= 1

    def bind(self, value: Any, hint: str = "k") -> str:
        """A name for `value`; the same one if it was bound before."""
        if id(value) not in self._bound:
            name = f"_{hint}_{len(self._bound)}"  # no graph names a value so
            self._bound[id(value)] = name
            self.names[name] = value
        return self._bound[id(value)]

    def literal(self, value: Any) -> str:
        """An expression for a constant."""
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        if type(value) is list:
            return "[" + ", ".join(self.literal(item) for item in value) + "]"
        if type(value) is tuple:
            return "(" + "".join(self.literal(item) + ", " for item in value) + ")"
        return self.bind(value)

    def load(self, label: str) -> dict[str, Any]:
        """Run the text; `label` names it in tracebacks."""
        text = "\n".join(self.lines) + "\n"
        file = f"<stator {label} {sha256(text.encode()).hexdigest()[:16]}>"
        # Kept in the line cache, so that a traceback shows the generated line; once for each text,
        # however often it is loaded.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        space = dict(self.names)
        exec(compile(text, file, "exec"), space)
        return space
