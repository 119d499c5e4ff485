"""The border to Dynamo's symbolic sizes: sympy comes in, our index algebra goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from stator.loops.index import (
    Axis,
    Clamped,
    Element,
    Index,
    Quotient,
    Remainder,
    Symbol,
    is_at_least,
)
from stator.torch_api import is_natural, size_expression, size_hint


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a call finds a number.  Text form: `(x.size(0) - 3) // 2`, `n` or `7`."""

    source: str | None  # an input: a tensor, or the number itself; None: it is `start`
    dim: int | None = None  # of the tensor
    start: int = 0
    step: int = 1

    def __str__(self) -> str:
        if self.source is None:
            return str(self.start)
        shown = self.source if self.dim is None else f"{self.source}.size({self.dim})"
        return (
            shown
            if (self.start, self.step) == (0, 1)
            else f"({shown} - {self.start}) // {self.step}"
        )


@dataclass(slots=True)
class Sizes:
    """Symbols of one graph: where a call finds their values, and what they were when it was made.

    A symbol is named `size_s0`, which is also its name in the program that runs the kernels.
    """

    sources: dict[Symbol, Shown] = field(default_factory=dict)
    hints: dict[Symbol, int] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)  # by Dynamo's names

    def learn(self, placeholder: fx.Node) -> None:
        """Take in the symbols that an input shows."""
        value = placeholder.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._found(value, Shown(placeholder.name))
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            for dim, size in enumerate(value.size()):
                if isinstance(size, torch.SymInt):
                    self._found(size, Shown(placeholder.name, dim))

    def _found(self, size: torch.SymInt, shown: Shown) -> None:
        """Take in the one symbol of a size: where an input shows 2*s0 + 3, it shows s0 as well."""
        expression = size_expression(size)
        line = None if expression is None else _line(expression)
        hint = None if line is None else size_hint(size)
        if hint is None or line is None or line[0].name in self.symbols:
            return
        name, step, start = line[0].name, line[1], line[2]
        symbol = Symbol(f"size_{name}", is_signed=not is_natural(size, line[0]))
        self.symbols[name] = symbol
        self.sources[symbol] = replace(shown, start=start, step=step)
        self.hints[symbol] = (hint - start) // step

    def index(self, size: Any) -> Index | None:
        """A size as an index; None if it is no polynomial of sizes that the inputs show."""
        if isinstance(size, int):
            return Index.of(size)
        expression = size_expression(size) if isinstance(size, torch.SymInt) else None
        return None if expression is None else self.of_expression(expression)

    def stride(self, step: Any) -> Index | None:
        """A stride as an index; None as with `index`.

        Torch makes it a product of Max(1, n).  Where a dimension is empty nothing is touched, so
        what elements lie at is the product of n.
        """
        if isinstance(step, torch.SymInt):
            expression = size_expression(step)
            return None if expression is None else self.of_expression(_of_dimensions(expression))
        return self.index(step)

    def of_expression(self, expression: Any) -> Index | None:
        """A sympy expression as an index; None where there is no rule for one of its parts."""
        if expression.is_Integer:
            return Index.of(int(expression))
        if expression.is_Symbol:
            symbol = self.symbols.get(expression.name)
            return None if symbol is None else Index.of(symbol)
        parts = [self.of_expression(part) for part in expression.args]
        known = [part for part in parts if part is not None]
        return _combined(expression, known) if len(known) == len(parts) > 0 else None

    def hint(self, index: Index) -> int:
        """What a size was when the graph was captured."""
        return evaluate(index, self.hints)


def is_division(expression: Any) -> bool:
    """Whether a sympy expression divides, for the quotient or for the rest."""
    return type(expression).__name__ in _DIVISIONS


def evaluate(index: Index, known: Mapping[Symbol, int]) -> int:
    """What a size is, with these values of symbols."""
    total = 0
    for product, factor in index.terms:
        for atom in product:
            factor *= _value_of(atom, known)
        total += factor
    return total


def _value_of(atom: object, known: Mapping[Symbol, int]) -> int:
    match atom:
        case Symbol():
            return known[atom]
        case Quotient():
            return evaluate(atom.value, known) // max(evaluate(atom.by, known), 1)
        case Remainder():
            return evaluate(atom.value, known) % max(evaluate(atom.by, known), 1)
        case Clamped():
            value, low, high = (evaluate(i, known) for i in (atom.value, atom.low, atom.high))
            return max(low, min(value, high))
        case Axis() | Element():
            raise AssertionError(f"{atom} is no size")
        case _:
            raise AssertionError(f"{atom} is no atom")


def _line(expression: Any) -> tuple[Any, int, int] | None:
    """The symbol, the step and the start of step*symbol + start; None if it is not of that form."""
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    start = expression.subs(symbol, 0)
    step = expression.subs(symbol, 1) - start
    if not (start.is_Integer and step.is_Integer and step > 0):
        return None
    is_line = (expression - step * symbol - start).expand() == 0
    return (symbol, int(step), int(start)) if is_line else None


def _of_dimensions(expression: Any) -> Any:
    """Max(1, n)  -->  n, anywhere in a sympy expression"""

    def is_length(part: Any) -> bool:
        return type(part).__name__ == "Max" and len(part.args) == 2 and part.args[0] == 1

    return expression.replace(is_length, lambda part: part.args[1])


def _combined(expression: Any, parts: list[Index]) -> Index | None:
    kind = type(expression).__name__
    if expression.is_Add:
        return sum(parts, Index.of(0))
    if expression.is_Mul:
        return _product(parts)
    if kind in ("Pow", "PowByNatural"):
        count = parts[1].constant
        return _product([parts[0]] * count) if count is not None and count > 0 else None
    if kind not in _DIVISIONS or not is_at_least(parts[1], 0):
        return None  # ours divides by positive numbers alone
    return _DIVISIONS[kind](*parts)


_DIVISIONS: Final[dict[str, Callable[[Index, Index], Index]]] = {
    "FloorDiv": lambda over, under: over // under,
    "CleanDiv": lambda over, under: over // under,
    "CeilDiv": lambda over, under: (over + under - 1) // under,
    "Mod": lambda over, under: over % under,
    "PythonMod": lambda over, under: over % under,
}


def _product(parts: list[Index]) -> Index:
    total = Index.of(1)
    for part in parts:
        total = total * part
    return total
