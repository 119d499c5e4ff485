"""Loads replaced inside of expressions, indices that are computed included; choices settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stator.loops.index import Clamped, Element, Index, Quotient, Remainder, clamped
from stator.loops.ir import (
    Apply,
    Cast,
    Expr,
    IndexValue,
    Load,
    Within,
    expressions_in,
    innermost_first,
    within,
)

# What takes the place of a load, given its rewritten index as well; None: the load stays.
Replace: TypeAlias = Callable[[Load, Index], Expr | None]
Condition: TypeAlias = tuple[Index, Index]  # what a choice asks: is the index within the limit?


def substitute(expr: Expr, made: Mapping[str, Expr]) -> Expr:
    """`expr` with loads of buffers in `made` replaced."""
    if not made:
        return expr
    return rewritten(expr, lambda load, _: made.get(load.buffer.name), {})


def rewritten(expr: Expr, replace: Replace, seen: dict[Expr, Expr]) -> Expr:
    for part in innermost_first(expr, seen.__contains__):
        seen[part] = _rewritten(part, replace, seen)
    return seen[expr]


def _rewritten(expr: Expr, replace: Replace, seen: dict[Expr, Expr]) -> Expr:
    """The same, of an expression whose parts were seen."""
    match expr:
        case Load():
            index = rewritten_index(expr.index, replace, seen)
            found = replace(expr, index)
            return Load(expr.dtype, expr.buffer, index) if found is None else found
        case Apply():
            return Apply(expr.dtype, expr.prim, tuple(seen[arg] for arg in expr.args))
        case Cast():
            return Cast(expr.dtype, seen[expr.value])
        case IndexValue():
            return IndexValue(expr.dtype, rewritten_index(expr.index, replace, seen))
        case Within():
            index = rewritten_index(expr.index, replace, seen)
            limit = rewritten_index(expr.limit, replace, seen)
            return Within(expr.dtype, index, limit, seen[expr.inside], seen[expr.outside])
    return expr


def settled(expr: Expr, outcomes: Mapping[Condition, bool]) -> Expr:
    """`expr` with choices made whose outcome is known; those inside of indices stay."""
    if not outcomes:
        return expr
    seen: dict[Expr, Expr] = {}
    for part in innermost_first(expr, seen.__contains__):
        seen[part] = _settled(part, outcomes, seen)
    return seen[expr]


def _settled(expr: Expr, outcomes: Mapping[Condition, bool], seen: Mapping[Expr, Expr]) -> Expr:
    match expr:
        case Apply():
            return Apply(expr.dtype, expr.prim, tuple(seen[arg] for arg in expr.args))
        case Cast():
            return Cast(expr.dtype, seen[expr.value])
        case Within():
            outcome = outcomes.get((expr.index, expr.limit))
            if outcome is not None:
                return seen[expr.inside if outcome else expr.outside]
            return within(expr.index, expr.limit, seen[expr.inside], seen[expr.outside])
    return expr


def rewritten_index(index: Index, replace: Replace, seen: dict[Expr, Expr]) -> Index:
    if not expressions_in(index):
        return index
    total = Index.of(0)
    for product, factor in index.terms:
        part = Index.of(factor)
        for atom in product:
            part = part * _atom(atom, replace, seen)
        total = total + part
    return total


def _atom(atom: object, replace: Replace, seen: dict[Expr, Expr]) -> Index:
    match atom:
        case Element():
            return Index.of(Element(rewritten(atom.expr, replace, seen)))
        case Quotient():
            return rewritten_index(atom.value, replace, seen) // atom.by
        case Remainder():
            return rewritten_index(atom.value, replace, seen) % atom.by
        case Clamped():
            parts = (atom.value, atom.low, atom.high)
            return clamped(*(rewritten_index(part, replace, seen) for part in parts))
        case _:
            return Index.of(atom)  # type: ignore[arg-type]  # an axis or a symbol
