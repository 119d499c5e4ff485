"""The pool's rooms: they never overlap, join when they are free, and keep their pages."""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

import stator
from stator.runtime.memory import room_bytes
from stator.runtime.native.prelude import _function, set_spare
from tests.runtime.native.executors import compiled

MIB: Final = 1 << 20
SPARE: Final = 16 * MIB  # what may wait by default
SIZES: Final = (1 << 16, 100_000, 777_777, MIB, 3 * MIB, 5 * MIB)


@pytest.fixture(autouse=True)
def _own_pool() -> Iterator[None]:
    """The code is loaded, and nothing of other tests waits."""
    compiled(lambda x: x + 1, "native")(torch.ones(1 << 15))
    gc.collect()
    stator.trim()
    yield
    set_spare(SPARE)
    stator.trim()


def take(size: int) -> int:
    """The address of a room; its first and last words are its address and its size."""
    address = _function("stator_pool_take", ctypes.c_void_p, ctypes.c_int64)(size)
    assert isinstance(address, int), "no memory left"
    assert address % 64 == 0
    word(address).value = address
    word(address + size - 8).value = size
    return address


def give(address: int, size: int) -> None:
    assert word(address).value == address, "somebody else wrote here"
    assert word(address + size - 8).value == size, "somebody else wrote here"
    _function("stator_pool_give", None, ctypes.c_void_p, ctypes.c_void_p)(address, None)


def word(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def touch(address: int, size: int) -> None:
    ctypes.memset(address + 8, 1, size - 16)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spare", [0, SPARE, 1 << 40])
def test_rooms_never_overlap_and_the_counts_are_right(seed: int, spare: int) -> None:
    set_spare(spare)
    draw = random.Random(seed)
    before = stator.memory().used
    alive: list[tuple[int, int]] = []
    for _ in range(4000):
        if alive and (draw.random() < 0.5 or len(alive) > 60):
            give(*alive.pop(draw.randrange(len(alive))))
        else:
            size = draw.choice((*SIZES, draw.randrange(1 << 16, 1 << 22))) & -8
            alive.append((take(size), size))
    held = stator.memory()
    least = sum(room_bytes(size) for _, size in alive)
    assert least <= held.used - before <= least + 4096 * len(alive)
    assert held.used + held.idle <= held.peak + spare
    for room in alive:
        give(*room)
    assert stator.memory().used == before


def test_free_neighbours_are_one() -> None:
    sizes = [MIB, 2 * MIB, 3 * MIB, MIB]  # the last one holds the end
    rooms = [(take(size), size) for size in sizes]
    for place in (0, 2, 1):  # the middle one last: it joins both
        give(*rooms[place])
    address = take(6 * MIB)
    assert address == rooms[0][0]
    give(address, 6 * MIB)
    give(*rooms[3])


def test_the_smallest_room_that_is_large_enough_is_taken() -> None:
    rooms = [(take(size), size) for size in (8 * MIB, 1 << 16, 2 * MIB, 1 << 16, 4 * MIB, 1 << 16)]
    for room in rooms[::2]:
        give(*room)
    address = take(2 * MIB - 64)
    assert address == rooms[2][0]
    give(address, 2 * MIB - 64)
    for room in rooms[1::2]:
        give(*room)


def test_a_cycle_of_many_sizes_finds_its_pages_again() -> None:
    draw = random.Random(0)
    steps = [draw.choice(SIZES) + 64 * draw.randrange(1000) for _ in range(60)]

    def cycle() -> None:
        alive = []
        for size in steps:
            address = take(size)
            touch(address, size)
            alive.append((address, size))
            if len(alive) > 20:
                give(*alive.pop(draw.randrange(20)))
        for room in alive:
            give(*room)

    for _ in range(5):
        cycle()
    before = faults()
    for _ in range(5):
        cycle()
    assert faults() - before < 500, "of about 50,000 pages that each cycle touches"


def test_trim_gives_pages_back_between_rooms_that_are_used() -> None:
    rooms = [(take(4 * MIB), 4 * MIB) for _ in range(9)]
    for room in rooms:
        touch(*room)
    for room in rooms[::2]:
        give(*room)
    before = resident()
    assert stator.trim() >= 20 * MIB
    assert before - resident() >= 16 * MIB
    for room in rooms[1::2]:
        give(*room)  # what was between is as it was


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_where_few_addresses_are_allowed_a_smaller_stretch_does() -> None:
    text = """
import resource, torch, stator
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))  # less than what it would set aside
double = torch.compile(lambda x: x * 2, backend="stator")
kept = [double(torch.ones(1 << 20)) for _ in range(3)]
assert all(torch.equal(one, torch.full((1 << 20,), 2.0)) for one in kept)
print(stator.memory().used)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) == 3 * room_bytes(4 * MIB)
