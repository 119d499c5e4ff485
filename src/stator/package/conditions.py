"""What torch.export found sizes to obey, beside their bounds: a library checks it at every call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stator.errors import Unsupported
from stator.loops.index import Index
from stator.lower.sizes import Sizes, is_division

# In the text of a program that was saved: what its graph says as well, by symbols and their bounds.
_IN_THE_GRAPH: Final = re.compile(r"L\S+ == L\S+|L\S+ [<>]= \d+")
_WORDS: Final = {"==": "eq", "!=": "ne", "<": "slt", "<=": "sle", ">": "sgt", ">=": "sge"}


@dataclass(frozen=True, slots=True)
class Condition:
    """A relation of two sizes; `word` is LLVM's for it."""

    word: str
    left: Index
    right: Index
    text: str


def conditions_of(
    relations: Sequence[Any], sizes: Sizes, names: Mapping[str, str]
) -> tuple[Condition, ...]:
    """Relations of sympy's as conditions; `names`: what the caller knows placeholders as."""
    found: dict[Condition, None] = {}  # each once, in order
    for relation in relations:
        if isinstance(relation, str):
            if _IN_THE_GRAPH.fullmatch(relation) is None:
                raise _unknown(relation)
            continue
        text = _shown(relation, sizes, names)
        for by in _divisors(relation):  # before it is divided by
            found[_condition("sgt", by, Index.of(0), sizes, text)] = None
        word = _WORDS.get(getattr(relation, "rel_op", ""))
        if word is None:
            raise _unknown(text)
        left, right = relation.args
        found[_condition(word, left, sizes.of_expression(right), sizes, text)] = None
    return tuple(found)


def _condition(word: str, left: Any, right: Index | None, sizes: Sizes, text: str) -> Condition:
    value = sizes.of_expression(left)
    if value is None or right is None:
        raise _unknown(text)
    return Condition(word, value, right, text)


def _unknown(text: str) -> Unsupported:
    return Unsupported(
        "package",
        f"it was exported for inputs with {text}, which a library cannot check",
        hint="make the dimension static, or give its bounds in dynamic_shapes",
    )


def _divisors(expression: Any) -> Iterator[Any]:
    """What an expression divides by, the innermost first, unless it is a number."""
    for part in expression.args:
        yield from _divisors(part)
    if is_division(expression) and not expression.args[1].is_Integer:
        yield expression.args[1]


def _shown(relation: Any, sizes: Sizes, names: Mapping[str, str]) -> str:
    """A relation for people: `Eq(Mod(x.size(0), 2), 0)`."""

    def place(found: re.Match[str]) -> str:
        symbol = sizes.symbols.get(found[0])
        if symbol is None:
            return found[0]
        shown = sizes.sources[symbol]
        source = shown.source or ""
        return str(replace(shown, source=names.get(source, source)))

    return re.sub(r"\b[a-z]+\d+\b", place, str(relation))
