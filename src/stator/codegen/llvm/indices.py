"""Code for indices: sums of products, floor division, modulo, in 64 bits."""

from __future__ import annotations

from dataclasses import dataclass, field

from stator.codegen.llvm.writer import Writer
from stator.loops.index import (
    Axis,
    Clamped,
    Element,
    Index,
    Quotient,
    Remainder,
    Symbol,
    is_at_least,
    lower_bound,
)


@dataclass(slots=True)
class Indices:
    """Where code goes, what its loop counters are called, and code for indices over them."""

    w: Writer = field(default_factory=Writer)
    axes: dict[Axis, str] = field(default_factory=dict)

    def index(self, index: Index) -> str:
        """Code for an index."""
        if index.constant is not None:
            return str(index.constant)
        total: str | None = None
        for product, factor in index.terms:
            part: str | None = None
            for atom in product:
                value = self._atom(atom)
                part = value if part is None else self.w.let(f"mul nsw i64 {part}, {value}")
            if part is None:
                part = str(factor)
            elif factor != 1:
                part = self.w.let(f"mul nsw i64 {part}, {factor}")
            total = part if total is None else self.w.let(f"add nsw i64 {total}, {part}")
        assert total is not None, "an index without terms is the constant 0"
        return total

    def _atom(self, atom: object) -> str:
        match atom:
            case Axis():
                return self.axes[atom]
            case Symbol():
                return f"%{atom.name}"
            case Quotient():
                return self._divided(atom.value, atom.by, remainder=False)
            case Remainder():
                return self._divided(atom.value, atom.by, remainder=True)
            case Clamped():
                return self._clamped(atom)
            case Element():
                return self._element(atom)
            case _:
                raise AssertionError(f"no code for {atom}")

    def _element(self, element: Element) -> str:
        """A number that the program computes."""
        raise AssertionError(f"{element} is known inside of a kernel alone")

    def _clamped(self, atom: Clamped) -> str:
        value = self._clip(self.index(atom.value), self.index(atom.high), larger=False)
        return self._clip(value, self.index(atom.low), larger=True)

    def _clip(self, value: str, bound: str, *, larger: bool) -> str:
        """The larger or the smaller one of two."""
        predicate = "sgt" if larger else "slt"
        keep = self.w.let(f"icmp {predicate} i64 {value}, {bound}")
        return self.w.let(f"select i1 {keep}, i64 {value}, i64 {bound}")

    def _divided(self, value: Index, by: Index, *, remainder: bool) -> str:
        """Floor division; the machine's own where the value cannot be negative."""
        over, under = self.index(value), self.index(by)
        low = lower_bound(value)
        if low is not None and is_at_least(low, 0):
            return self.w.let(f"{'urem' if remainder else 'udiv'} i64 {over}, {under}")
        rest = self.w.let(f"srem i64 {over}, {under}")
        below = self.w.let(f"icmp slt i64 {rest}, 0")
        if remainder:
            lifted = self.w.let(f"add i64 {rest}, {under}")
            return self.w.let(f"select i1 {below}, i64 {lifted}, i64 {rest}")
        quotient = self.w.let(f"sdiv i64 {over}, {under}")
        lowered = self.w.let(f"sub i64 {quotient}, 1")
        return self.w.let(f"select i1 {below}, i64 {lowered}, i64 {quotient}")
