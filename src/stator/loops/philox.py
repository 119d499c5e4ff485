"""Philox-4x32 in 10 rounds: 128 random bits from a key of 64 bits and a counter of 128.

Published with known answers by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (2011).  A round is two wide multiplications: what GPUs are quick at, where Threefry's is
quicker on the vectors of a CPU.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from stator.loops.threefry import Words

Four: TypeAlias = tuple[Any, Any, Any, Any]  # words, as those of threefry.py

ROUNDS: Final = 10
FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
STEPS: Final = (0x9E3779B9, 0xBB67AE85)  # by which the key moves on from round to round

_WORD: Final = 0xFFFFFFFF


def philox(key: Words, counter: Four) -> Four:
    """Four words at random."""
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = (
            word + number * step & _WORD for word, step in zip(key, STEPS, strict=True)
        )
        (high, low), (other_high, other_low) = _product(a, FACTORS[0]), _product(c, FACTORS[1])
        a, b, c, d = other_high ^ b ^ first, other_low, high ^ d ^ second, low
    return a, b, c, d


def philox_one(key: Words, stream: Any, number: Words) -> Any:
    """One word at random: four neighbours share rounds, each takes the word of its place."""
    low, high = number
    a, b, c, d = philox(key, (low >> 2 | high << 30 & _WORD, high >> 2, stream, 0))
    is_odd, is_upper = low & 1, low >> 1 & 1
    lower, upper = a + (b - a) * is_odd, c + (d - c) * is_odd
    return lower + (upper - lower) * is_upper


def _product(word: Any, factor: int) -> Words:
    """The upper and the lower word of a product, by halves: 64 bits have no room for all of it."""
    below = word * (factor & 0xFFFF)
    above = word * (factor >> 16) + (below >> 16)
    return above >> 16, (above & 0xFFFF) << 16 | below & 0xFFFF
