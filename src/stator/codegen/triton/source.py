"""Generated functions as Python objects, with a source that Triton can ask for."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any


def function_of(name: str, source: str, names: Mapping[str, Any]) -> Callable[..., None]:
    """The function of a kernel's source, which refers to `names`."""
    label = f"<{name}>"
    linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
    scope: dict[str, Any] = dict(names)
    exec(compile(source, label, "exec"), scope)
    function: Callable[..., None] = scope[name]
    return function
