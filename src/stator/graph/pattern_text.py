"""Patterns as Python text, to be read by people and loaded without tracing anything."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stator.errors import CompileError
from stator.graph import match as kinds
from stator.graph.match import (
    MULTIPLE,
    Calls,
    Exactly,
    Ignored,
    KeywordArg,
    ListOf,
    MultiOutputPattern,
    Pattern,
    RepeatedExpr,
)
from stator.torch_api import HigherOrderOperator, OpOverload

HEAD = "# Written by `stator patterns build`; do not edit."


def pattern_text(pattern: Pattern) -> str:
    """One assignment for each node of the pattern; the last one is called `pattern`."""
    writer = _Writer()
    last = writer.name_of(pattern)
    return "\n".join([HEAD, *writer.lines, f"pattern = {last}", ""])


def read_pattern(file: Path) -> Pattern:
    """The pattern of a file whose text `pattern_text` wrote."""
    names = {name: getattr(kinds, name) for name in dir(kinds) if name[0].isupper()}
    scope: dict[str, Any] = {**names, "ops": torch.ops, "torch": torch, "function": _function}
    try:
        text = file.read_text(encoding="utf-8")
        exec(compile(text, file.name, "exec"), scope)  # a module of the package that registers it
        found = scope["pattern"]
    except Exception as error:
        raise CompileError(
            "patterns",
            f"{file.name} is no stored pattern: {error}",
            hint="`stator patterns build` writes it anew",
        ) from error
    assert isinstance(found, Pattern), f"{file.name} stores {found!r}"
    return found


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@dataclass(slots=True)
class _Writer:
    names: dict[Pattern, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def name_of(self, pattern: Pattern) -> str:
        if pattern not in self.names:
            text = self._text(pattern)
            name = pattern.name if isinstance(pattern, KeywordArg) else f"p{len(self.lines)}"
            if name in self.names.values():  # an argument that is called as another value is
                name = f"{name}_{len(self.lines)}"
            self.names[pattern] = name
            self.lines.append(f"{name} = {text}")
        return self.names[pattern]

    def _text(self, pattern: Pattern) -> str:
        kind = type(pattern).__name__
        match pattern:
            case KeywordArg():
                return f"{kind}({pattern.name!r})"
            case Exactly():
                raise CompileError("patterns", "a pattern for given sizes is not stored")
            case ListOf():
                return f"{kind}({self._value(pattern.pattern)}, partial={pattern.partial})"
            case RepeatedExpr():
                return f"{kind}({self._value(pattern.pattern)})"
            case MultiOutputPattern():
                return f"{kind}([{', '.join(map(self._value, pattern.outputs))}])"
            case Calls():
                targets = sorted(map(_target_text, pattern.targets))
                parts = [targets[0] if len(targets) == 1 else f"[{', '.join(targets)}]"]
                parts += map(self._value, pattern.args)
                users = "MULTIPLE" if pattern.users == MULTIPLE else pattern.users
                parts += [] if users == 1 else [f"_users={users}"]
                parts += [f"{name}={self._value(value)}" for name, value in pattern.kwargs.items()]
                return f"{kind}({', '.join(parts)})"
        return f"{kind}()"

    def _value(self, value: Any) -> str:
        if isinstance(value, Ignored):
            return "Ignored()"
        if isinstance(value, Pattern):
            return self.name_of(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, OpOverload):
            return _target_text(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f"float({str(value)!r})"
        return repr(value)


def _target_text(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"ops.higher_order.{target.name()}"
    if isinstance(target, str):
        return repr(target)
    return f"function({target.__module__!r}, {target.__qualname__!r})"
