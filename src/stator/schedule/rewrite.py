"""Loads replaced inside of expressions, indices that are computed included; choices settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stator.loops.index import Clamped, Element, Index, Quotient, Remainder, clamped
from stator.loops.ir import Apply, Cast, Expr, IndexValue, Load, Within, within

# None: the load stays.  What takes its place is taken as it is: an index in it has to be rewritten.
Replace: TypeAlias = Callable[[Load], Expr | None]
Condition: TypeAlias = tuple[Index, Index]  # what a choice asks: is the index within the limit?


def substitute(expr: Expr, made: Mapping[str, Expr]) -> Expr:
    """`expr` with loads of buffers in `made` replaced."""
    if not made:
        return expr
    return rewritten(expr, lambda load: made.get(load.buffer.name), {})


def rewritten(expr: Expr, replace: Replace, seen: dict[Expr, Expr]) -> Expr:
    if expr in seen:
        return seen[expr]
    result = expr
    if isinstance(expr, Load):
        found = replace(expr)
        result = Load(expr.dtype, expr.buffer, rewritten_index(expr.index, replace, seen))
        if found is not None:
            result = found
    elif isinstance(expr, Apply):
        args = tuple(rewritten(arg, replace, seen) for arg in expr.args)
        result = Apply(expr.dtype, expr.prim, args)
    elif isinstance(expr, Cast):
        result = Cast(expr.dtype, rewritten(expr.value, replace, seen))
    elif isinstance(expr, IndexValue):
        result = IndexValue(expr.dtype, rewritten_index(expr.index, replace, seen))
    elif isinstance(expr, Within):
        sides = [rewritten(side, replace, seen) for side in expr.operands]
        index = rewritten_index(expr.index, replace, seen)
        limit = rewritten_index(expr.limit, replace, seen)
        result = Within(expr.dtype, index, limit, *sides)
    seen[expr] = result
    return result


def settled(expr: Expr, outcomes: Mapping[Condition, bool]) -> Expr:
    """`expr` with choices made whose outcome is known; those inside of indices stay."""
    return _settled(expr, outcomes, {}) if outcomes else expr


def _settled(expr: Expr, outcomes: Mapping[Condition, bool], seen: dict[Expr, Expr]) -> Expr:
    if expr in seen:
        return seen[expr]
    result = expr
    if isinstance(expr, Apply):
        args = tuple(_settled(arg, outcomes, seen) for arg in expr.args)
        result = Apply(expr.dtype, expr.prim, args)
    elif isinstance(expr, Cast):
        result = Cast(expr.dtype, _settled(expr.value, outcomes, seen))
    elif isinstance(expr, Within):
        outcome = outcomes.get((expr.index, expr.limit))
        if outcome is not None:
            result = _settled(expr.inside if outcome else expr.outside, outcomes, seen)
        else:
            sides = (_settled(side, outcomes, seen) for side in expr.operands)
            result = within(expr.index, expr.limit, *sides)
    seen[expr] = result
    return result


def rewritten_index(index: Index, replace: Replace, seen: dict[Expr, Expr]) -> Index:
    if not any(_holds_element(atom) for product, _ in index.terms for atom in product):
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


def _holds_element(atom: object) -> bool:
    if isinstance(atom, Quotient | Remainder):
        return any(_holds_element(a) for product, _ in atom.value.terms for a in product)
    if isinstance(atom, Clamped):
        parts = (atom.value, atom.low, atom.high)
        return any(_holds_element(a) for i in parts for product, _ in i.terms for a in product)
    return isinstance(atom, Element)
