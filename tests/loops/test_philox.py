"""Philox against the answers that were published with it, in every kind of integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from scipy import stats

from stator.loops import interp
from stator.loops.philox import philox, philox_one
from stator.loops.prims import Prim
from tests.loops.test_threefry import KINDS

Pair = tuple[int, int]
Words = tuple[int, int, int, int]

WORD: Final = 0xFFFFFFFF
# Key, counter, result: those of Random123 for 10 rounds.
KNOWN: Final[tuple[tuple[Pair, Words, Words], ...]] = (
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (WORD, WORD),
        (WORD, WORD, WORD, WORD),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
NUMBERS: Final = (0, 1, 6, 7, (1 << 32) - 1, 1 << 32, (5 << 32) + 3, (7 << 34) + 2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_known_answers(
    kind: Callable[[int], Any], key: Pair, counter: Words, result: Words
) -> None:
    a, b, c, d = map(kind, counter)
    words = philox((kind(key[0]), kind(key[1])), (a, b, c, d))

    assert tuple(int(word) for word in words) == result


def test_the_primitive_of_the_interpreter() -> None:
    zero = np.int32(0)
    words = [interp.PRIMS[Prim.PHILOX_ONE](zero, zero, zero, np.int32(n), zero) for n in range(4)]

    assert all(type(word) is np.int32 for word in words)
    assert tuple(int(word) & WORD for word in words) == KNOWN[0][2]


@pytest.mark.parametrize("number", NUMBERS)
def test_four_neighbours_share_the_words_of_their_quarter(number: int) -> None:
    quarter = number >> 2
    words = philox((5, 6), (quarter & WORD, quarter >> 32, 9, 0))

    assert philox_one((5, 6), 9, (number & WORD, number >> 32)) == words[number & 3]


def test_a_bit_of_the_counter_or_the_key_changes_half_of_the_result() -> None:
    start = philox((5, 6), (1, 2, 3, 4))
    changes = []
    for bit in range(32):
        flip = 1 << bit
        changes += [philox((5 ^ flip, 6), (1, 2, 3, 4)), philox((5, 6 ^ flip), (1, 2, 3, 4))]
        changes += [philox((5, 6), (1 ^ flip, 2, 3, 4)), philox((5, 6), (1, 2 ^ flip, 3, 4))]
        changes += [philox((5, 6), (1, 2, 3 ^ flip, 4)), philox((5, 6), (1, 2, 3, 4 ^ flip))]
    counts = [sum((x ^ y).bit_count() for x, y in zip(start, w, strict=True)) for w in changes]

    assert all(36 <= count <= 92 for count in counts)  # of 128; 5 deviations
    assert 63 < sum(counts) / len(counts) < 65


@pytest.mark.parametrize("step", [1, 2, 3, 4, 1024])
def test_pairs_of_words_are_equally_frequent(step: int) -> None:
    """Upper bits of neighbours, of those that share rounds too, and of two streams."""
    number = torch.arange(1 << 18)
    first, other = (
        philox_one((torch.tensor(3), torch.tensor(4)), n, (number, torch.zeros_like(number)))
        for n in (0, 1)
    )

    for left, right in ((first[:-step], first[step:]), (first, other)):
        pairs = (left >> 28) * 16 + (right >> 28)
        counts = torch.bincount(pairs, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert abs(float(first.double().mean()) / 2**32 - 0.5) < 5 / (12 * len(number)) ** 0.5
