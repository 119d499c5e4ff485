"""Loops along rows that begin and end anywhere, in the widest accesses all the same.

A thread moves 16 bytes at once where the compiler knows that they lie at a multiple of 16, and
that all of them are wanted.  Rows of 50,257 elements of two bytes are neither: each begins
elsewhere, and to ask at every element where the row ends takes the accesses apart.

before: for r in blocks of the row:      x[50257*i + r], if r < 50257
after:  the row is counted from the border before it:  r = q - 50257*i % 8,  x[50257*i//8*8 + q];
        the first block and the last ones ask for its ends, those between ask nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stator.codegen.triton.emitter import Emitter
from stator.codegen.triton.shape import WIDEST
from stator.loops.access import nodes
from stator.loops.index import Axis, Index, is_at_least, lower_bound
from stator.loops.ir import Buffer, Load, Statement, Store

FEWEST: int = 4  # blocks of a row for which this pays


@dataclass(frozen=True, slots=True)
class Part:
    """Some blocks of a row, in one loop."""

    first: int
    end: int
    blocks: int  # that are taken at once
    asks_begin: bool = False  # whether some of it may lie before the row
    asks_end: bool = False  # or behind it

    def head(self, block: int) -> str:
        """The loop's first line."""
        return f"for r_ in range({self.first}, {self.end}, {self.blocks * block}):"


@dataclass(frozen=True, slots=True)
class Row:
    """A row that is counted from the border before it."""

    axis: Axis
    length: int
    width: int  # elements from one border to the next
    own: Index  # where it begins, less what lies at a border in any case
    places: tuple[Index, ...]  # accesses that reach the borders together

    def parts(self, block: int, at_once: int = 1) -> Iterator[Part]:
        """The blocks: the first, those inside of the row, the rest."""
        late = self.width - 1 if self.own.terms else 0
        first = block if late else 0
        inside = self.length // block * block - first
        middle = first + inside // (at_once * block) * (at_once * block)
        if first:
            yield Part(0, first, 1, asks_begin=True)
        yield Part(first, middle, at_once)
        if middle < self.length + late:
            yield Part(middle, self.length + late, 1, asks_end=True)

    def begin(self, e: Emitter) -> None:
        """Before the loops: where the border is, and how far behind it the row begins."""
        if self.own.terms:
            place = e.index(self.own)
            e.line(f"border_ = {place} // {self.width} * {self.width}")
            e.line(f"late_ = {place} % {self.width}")

    def enter(self, e: Emitter, count: str) -> str:
        """The axis, and the places of its accesses, at a block of counts; the axis's name."""
        name = e.let(f"{count} - late_", "r") if self.own.terms else count
        e.enter(self.axis, name, "r")
        for place in self.places:
            above = place - self.axis - self.own
            known = ["border_"] if self.own.terms else []
            known += [e.index(above)] if above.terms else []
            e.places[place] = e.let(" + ".join((*known, count)), "p")
        return name

    def mask(self, e: Emitter, name: str, part: Part) -> str | None:
        """Where counts lie inside of the row; None where all of them do."""
        asked = [f"({name} >= 0)"] * part.asks_begin + [f"({name} < {self.length})"] * part.asks_end
        return e.let(" & ".join(asked), "m") if asked else None


def row_of(inner: Sequence[Axis], body: Sequence[Statement], block: int) -> Row | None:
    """The row of a stage; None where whole blocks are at borders anyway, or nothing is gained."""
    length = inner[0].size.constant if len(inner) == 1 else None
    if length is None or length < FEWEST * block:
        return None
    axis = inner[0]
    found = [(b, place) for b, place in _accesses(body) if place.factor_of(axis) == Index.of(1)]
    if not found:
        return None
    width = WIDEST // min(buffer.dtype.bytes for buffer, _ in found)
    starts = Counter(_beside_borders(place - axis, width) for _, place in found)
    own = starts.most_common(1)[0][0]
    low = lower_bound(own)
    if width == 1 or low is None or not is_at_least(low, 0):
        return None
    if not own.terms and length % width == 0:
        return None
    together = (place for _, place in found if _beside_borders(place - axis, width) == own)
    return Row(axis, length, width, own, tuple(dict.fromkeys(together)))


def _accesses(body: Sequence[Statement]) -> Iterator[tuple[Buffer, Index]]:
    for statement in body:
        if isinstance(statement, Store):
            yield statement.buffer, statement.index
        for node in nodes(statement):
            if isinstance(node, Load):
                yield node.buffer, node.index


def _beside_borders(start: Index, width: int) -> Index:
    """What is left of a place without the parts that are multiples of a width."""
    return Index(tuple(term for term in start.terms if term[1] % width))
