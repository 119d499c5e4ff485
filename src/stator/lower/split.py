"""Reductions to few results, in two steps, so that threads share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stator.core.dtypes import DType
from stator.loops.build import const
from stator.loops.index import Index
from stator.loops.ir import Combine, Expr, within
from stator.loops.values import Point, product, unflat

MOST_PIECES: Final = 256
FEWEST_PIECES: Final = 32
FEW_RESULTS: Final = 8  # computed one a thread; with more there is enough to share
WORTH_IT: Final = 1 << 16  # elements for each result
# On a GPU:
ENOUGH_PROGRAMS: Final = 1 << 10  # they fill a large card several times
MOST_PROGRAMS: Final = 1 << 13  # of long pieces: 4 % quicker than 1,024 of eight times the length
LONG: Final = 1 << 15  # elements of a piece that could be shorter
ENOUGH_ROWS: Final = 1 << 8  # that are taken by many threads each
RESULTS_ACROSS: Final = 64  # of one program
SHORTEST: Final = 1 << 11  # elements of a piece
SHORTEST_ACROSS: Final = 1 << 6

Body = Callable[[Point, Point], Expr]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A reduction over `count` pieces of `length` elements each, the last one perhaps shorter."""

    count: int
    length: int
    body: Callable[[Point, Index, Index], Expr]  # of the kept point, the piece, the place in it


def in_pieces(
    combine: Combine, size: Sequence[Index], inner: Sequence[Index], body: Body
) -> Pieces | None:
    """How to cut a reduction; None where it is not worth it."""
    results, elements = product(size).constant, product(inner).constant
    if results is None or elements is None or results > FEW_RESULTS or elements < WORTH_IT:
        return None
    count = next((n for n in range(FEWEST_PIECES, MOST_PIECES) if elements % n == 0), None)
    return _cut(combine, inner, body, count or FEWEST_PIECES)


def in_pieces_on_a_gpu(
    combine: Combine, size: Sequence[Index], inner: Sequence[Index], body: Body, *, across: bool
) -> Pieces | None:
    """The same for a card, which wants far more programs; `across`: one takes many results.

    So it is where results lie closer in memory than the elements of one.
    """
    results, elements = product(size).constant, product(inner).constant
    if results is None or elements is None or results * elements < WORTH_IT:
        return None
    programs = max(results // RESULTS_ACROSS, 1) if across else results
    most = elements // (SHORTEST_ACROSS if across else SHORTEST)
    if not across and programs >= ENOUGH_ROWS:
        return None
    wanted = min(-(-ENOUGH_PROGRAMS // programs), most)
    if not across:
        wanted = max(wanted, min(elements // LONG, MOST_PROGRAMS // programs))
    if wanted < 2:
        return None
    even = (n for n in range(wanted, min(2 * wanted, most) + 1) if elements % n == 0)
    return _cut(combine, inner, body, next(even, wanted))


def _cut(combine: Combine, inner: Sequence[Index], body: Body, count: int) -> Pieces:
    elements = product(inner).constant
    assert elements is not None, "known sizes are cut"
    length, total = -(-elements // count), Index.of(elements)

    def piece(kept: Point, number: Index, place: Index) -> Expr:
        at = number * length + place
        value = body(kept, unflat(at, inner))
        if elements % count == 0:
            return value
        return within(at, total, value, neutral(combine, value.dtype))

    return Pieces(count, length, piece)


def neutral(combine: Combine, dtype: DType) -> Expr:
    """What changes nothing when it is combined."""
    if combine in (Combine.SUM, Combine.PROD, Combine.ANY, Combine.ALL):
        return const(combine in (Combine.PROD, Combine.ALL), dtype)
    low = combine is Combine.MAX
    if dtype.is_float:
        return const(float("-inf") if low else float("inf"), dtype)
    if dtype is DType.BOOL:
        return const(not low, dtype)
    bits = 8 * dtype.bytes - dtype.is_signed
    least = -(1 << bits) if dtype.is_signed else 0
    return const(least if low else (1 << bits) - 1, dtype)
