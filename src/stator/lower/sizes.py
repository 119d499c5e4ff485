"""The border to Dynamo's symbolic sizes: sympy comes in, our index algebra goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stator.loops.index import Axis, Element, Index, Quotient, Remainder, Symbol
from stator.torch_api import size_expression, size_hint


@dataclass(slots=True)
class Sizes:
    """Symbols of one graph: where a call finds their values, and what they were when it was made.

    A symbol is named `size_s0`, which is also its name in the program that runs the kernels.
    """

    sources: dict[Symbol, str] = field(default_factory=dict)  # symbol -> expression of the inputs
    hints: dict[Symbol, int] = field(default_factory=dict)

    def learn(self, placeholder: fx.Node) -> None:
        """Take in the symbols that an input shows."""
        value = placeholder.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._found(value, placeholder.name)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            for dim, size in enumerate(value.size()):
                if isinstance(size, torch.SymInt):
                    self._found(size, f"{placeholder.name}.size({dim})")

    def _found(self, size: torch.SymInt, source: str) -> None:
        symbol = _symbol(size_expression(size))
        hint = size_hint(size)
        if symbol is not None and hint is not None and symbol not in self.sources:
            self.sources[symbol] = source
            self.hints[symbol] = hint

    def index(self, size: Any) -> Index | None:
        """A size as an index; None if it is no polynomial of sizes that the inputs show."""
        if isinstance(size, torch.SymInt):
            found = _index(size_expression(size))
            if found is None or any(s not in self.sources for s in symbols_in(found)):
                return None
            return found
        return Index.of(size) if isinstance(size, int) else None

    def hint(self, index: Index) -> int:
        """What a size was when the graph was captured."""
        total = 0
        for product, factor in index.terms:
            for atom in product:
                factor *= self._hint_of(atom)
            total += factor
        return total

    def _hint_of(self, atom: object) -> int:
        match atom:
            case Symbol():
                return self.hints[atom]
            case Quotient():
                return self.hint(atom.value) // max(self.hint(atom.by), 1)
            case Remainder():
                return self.hint(atom.value) % max(self.hint(atom.by), 1)
            case Axis() | Element():
                raise AssertionError(f"{atom} is no size")
            case _:
                raise AssertionError(f"{atom} is no atom")


def symbols_in(index: Index) -> list[Symbol]:
    """Symbols that a size holds."""
    found: list[Symbol] = []
    for product, _ in index.terms:
        for atom in product:
            if isinstance(atom, Symbol):
                found.append(atom)
            elif isinstance(atom, Quotient | Remainder):
                found += symbols_in(atom.value) + symbols_in(atom.by)
    return found


def _symbol(expression: Any) -> Symbol | None:
    return Symbol(f"size_{expression.name}") if expression.is_Symbol else None


def _index(expression: Any) -> Index | None:
    """A sympy expression as an index; None where there is no rule for one of its parts."""
    if expression.is_Integer:
        return Index.of(int(expression))
    if expression.is_Symbol:
        return Index.of(Symbol(f"size_{expression.name}"))
    parts = [_index(part) for part in expression.args]
    if not parts or any(part is None for part in parts):
        return None
    return _combined(expression, [part for part in parts if part is not None])


def _combined(expression: Any, parts: list[Index]) -> Index | None:
    kind = type(expression).__name__
    if expression.is_Add:
        return sum(parts, Index.of(0))
    if expression.is_Mul:
        return _product(parts)
    if kind in ("Pow", "PowByNatural"):
        count = parts[1].constant
        return _product([parts[0]] * count) if count is not None and count > 0 else None
    if kind in ("FloorDiv", "CleanDiv"):
        return parts[0] // parts[1]
    if kind in ("Mod", "PythonMod"):
        return parts[0] % parts[1]
    if kind == "CeilDiv":
        return (parts[0] + parts[1] - 1) // parts[1]
    return None


def _product(parts: list[Index]) -> Index:
    total = Index.of(1)
    for part in parts:
        total = total * part
    return total
