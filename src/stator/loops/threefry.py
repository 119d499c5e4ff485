"""Threefry-2x32 in 20 rounds: 64 random bits from a key and a counter of 64 bits each.

Published with known answers by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (2011).  Every counter gives its own bits, so elements are drawn in any order.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

# Integers from 0 to below 2**32: of Python, or arrays of 64-bit ones, of numpy or torch.
Words: TypeAlias = tuple[Any, Any]

ROUNDS: Final = 20
PARITY: Final = 0x1BD11BDA
ROTATIONS: Final = (13, 15, 26, 6, 17, 29, 16, 24)

_WORD: Final = 0xFFFFFFFF


def threefry(key: Words, counter: Words) -> Words:
    """Two words at random."""
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    x, y = counter[0] + keys[0] & _WORD, counter[1] + keys[1] & _WORD
    for number in range(ROUNDS):
        x = x + y & _WORD
        y = _rotated(y, ROTATIONS[number % len(ROTATIONS)]) ^ x
        if number % 4 == 3:  # the key comes in again, each time turned by one
            turn = number // 4 + 1
            x = x + keys[turn % 3] & _WORD
            y = y + keys[(turn + 1) % 3] + turn & _WORD
    return x, y


def threefry_one(key: Words, number: Words) -> Any:
    """One word at random: neighbours share rounds, the even one takes the first word of both."""
    low, high = number
    first, second = threefry(key, (low >> 1 | high << 31 & _WORD, high >> 1))
    return first + (second - first) * (low & 1)


def _rotated(word: Any, count: int) -> Any:
    return (word << count | word >> 32 - count) & _WORD
