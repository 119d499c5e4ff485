"""Threefry against the answers that were published with it, in every kind of integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from stator.loops import interp
from stator.loops.prims import Prim
from stator.loops.threefry import threefry, threefry_one

Pair = tuple[int, int]

# Key, counter, result: those of Random123 for 20 rounds.
KNOWN: Final[tuple[tuple[Pair, Pair, Pair], ...]] = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x1CB996FC, 0xBB002BE7),
    ),
    (
        (0x13198A2E, 0x03707344),
        (0x243F6A88, 0x85A308D3),
        (0xC4923A9C, 0x483DF7A0),
    ),
)

KINDS: Final[dict[str, Callable[[int], Any]]] = {
    "python": int,
    "numpy": np.int64,
    "torch": torch.tensor,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_known_answers(kind: Callable[[int], Any], key: Pair, counter: Pair, result: Pair) -> None:
    words = threefry((kind(key[0]), kind(key[1])), (kind(counter[0]), kind(counter[1])))

    assert tuple(int(word) for word in words) == result


@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_the_primitives_of_the_interpreter(key: Pair, counter: Pair, result: Pair) -> None:
    signed = [np.array(word, np.uint32).view(np.int32)[()] for word in (*key, *counter)]
    words = [interp.PRIMS[prim](*signed) for prim in (Prim.THREEFRY_0, Prim.THREEFRY_1)]

    assert all(type(word) is np.int32 for word in words)
    assert tuple(int(word) & 0xFFFFFFFF for word in words) == result


def test_a_bit_of_the_counter_or_the_key_changes_half_of_the_result() -> None:
    changes = []
    for bit in range(64):
        flipped = (1 << bit & 0xFFFFFFFF, 1 << bit >> 32)
        changes += [threefry((5, 6), flipped), threefry((5 ^ flipped[0], 6 ^ flipped[1]), (0, 0))]
    start = threefry((5, 6), (0, 0))
    counts = [
        sum((a ^ b).bit_count() for a, b in zip(start, pair, strict=True)) for pair in changes
    ]

    assert all(14 <= count <= 50 for count in counts)  # of 64; 4.5 deviations
    assert 31 < sum(counts) / len(counts) < 33


@pytest.mark.parametrize("number", [0, 1, 6, 7, (1 << 32) - 1, 1 << 32, (5 << 32) + 3])
def test_two_neighbours_share_the_words_of_their_half(number: int) -> None:
    half = number >> 1
    words = threefry((5, 6), (half & 0xFFFFFFFF, half >> 32))

    assert threefry_one((5, 6), (number & 0xFFFFFFFF, number >> 32)) == words[number & 1]
