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
    length = elements // count if count else -(-elements // FEWEST_PIECES)
    total = Index.of(elements)

    def piece(kept: Point, number: Index, place: Index) -> Expr:
        at = number * length + place
        value = body(kept, unflat(at, inner))
        return value if count else within(at, total, value, neutral(combine, value.dtype))

    return Pieces(count or FEWEST_PIECES, length, piece)


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
