"""Kernels over lists: threads share the iterations of all, wherever one item ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from stator.loops import interp
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from tests.codegen.llvm.execute import Compiled
from tests.fuzz.arguments import Array, overrun, with_margins
from tests.fuzz.compare import difference

UPDATE: Final = """
kernel update
  buffer x: {dtype}[n]
  buffer g: {dtype}[n]
  buffer new: {dtype}[n]
  shares new: x
  outer i: n
  stage
    new[i] = sub(x[i], g[i])
"""
SUMS: Final = """
kernel sums
  buffer x: f32[n*m]
  buffer out: f32[n]
  outer i: n
  stage j: m
    acc sum= x[i*m + j]
  stage
    out[i] = acc
"""
COLUMNS: Final = """
kernel columns
  buffer x: f32[n*m]
  buffer out: f32[m]
  outer i: m
  stage j: n
    acc sum= x[j*m + i]
  stage
    out[i] = acc
"""
TURNED: Final = """
kernel turned
  buffer x: f32[n*m]
  buffer out: f32[n*m]
  outer i: n, j: m
  stage
    out[i*m + j] = x[j*n + i]
"""
SCRATCH: Final = """
kernel scratch
  buffer x: f32[n*m]
  buffer out: f32[n*m]
  scratch e: f32[m]
  outer i: n
  stage j: m
    e[j] = mul(x[i*m + j], 2.0:f32)
    acc sum= x[i*m + j]
  stage j: m
    out[i*m + j] = sub(e[j], acc)
"""


def over_list(text: str) -> tuple[Compiled, Kernel]:
    """The kernel over a list, and the same over one item."""
    single = parse(text)
    return Compiled(replace(single, is_list=True)), single


def require(text: str, items: Sequence[dict[str, int]], threads: Sequence[int]) -> None:
    """The list must do to each item what the kernel does to it alone."""
    kernel, single = over_list(text)
    given = [kernel.arrays(sizes, seed) for seed, sizes in enumerate(items)]
    expected = [{name: array.copy() for name, array in arrays.items()} for arrays in given]
    for arrays, sizes in zip(expected, items, strict=True):
        interp.run(single, arrays, sizes)
    for count in threads:
        copies = [with_margins(arrays) for arrays in given]
        kernel.run_list(
            [kernel.given(own, sizes) for (own, _), sizes in zip(copies, items, strict=True)], count
        )
        for number, (own, memory) in enumerate(copies):
            wrong = overrun(memory) or difference(single, own, expected[number])
            assert wrong is None, f"item {number} of {items}, {count} threads: {wrong}"


def lengths(*numbers: int) -> list[dict[str, int]]:
    return [{"n": n} for n in numbers]


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_threads_share_all_items(threads: int) -> None:
    for numbers in ((100,), (1, 1, 1), (33, 1, 17, 16, 15), (5, 1000, 3), (64, 64, 64, 64)):
        require(UPDATE.format(dtype="f32"), lengths(*numbers), (threads,))


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "i64", "u8"])
def test_items_of_every_type(dtype: str) -> None:
    require(UPDATE.format(dtype=dtype), lengths(17, 33, 1, 100), (1, 2, 3))


def test_empty_items_are_passed_over() -> None:
    require(UPDATE.format(dtype="f32"), lengths(0, 17, 0, 0, 5, 0), (1, 2, 3))


def test_an_empty_list_is_nothing_to_do() -> None:
    require(UPDATE.format(dtype="f32"), (), (1, 2))


def test_a_long_list() -> None:
    require(UPDATE.format(dtype="f32"), lengths(*(1 + n % 7 for n in range(200))), (1, 3))


SHAPES: Final = {"rows": SUMS, "columns": COLUMNS, "tiles": TURNED, "scratch": SCRATCH}


@pytest.mark.parametrize("name", SHAPES)
def test_items_of_two_sizes_in_every_shape_of_loops(name: str) -> None:
    items = [{"n": n, "m": m} for n, m in ((5, 7), (1, 1), (33, 17), (16, 40), (3, 600))]

    require(SHAPES[name], items, (1, 2, 5))


def test_items_without_sizes() -> None:
    """Scalars: the counters of an optimizer's steps."""
    text = """
kernel count
  buffer step: f32[1]
  buffer new: f32[1]
  shares new: step
  stage
    new[0] = add(step[0], 1.0:f32)
"""
    kernel, _ = over_list(text)
    steps: list[Array] = [np.full(1, float(n), np.float32) for n in range(10)]

    for threads in (1, 2, 4):
        kernel.run_list([[step.ctypes.data] for step in steps], threads)

    assert [float(step[0]) for step in steps] == [n + 3.0 for n in range(10)]


def test_one_item_does_not_write_into_another() -> None:
    """Items that lie next to each other in memory."""
    kernel, _ = over_list(UPDATE.format(dtype="f32"))
    memory, ones = np.zeros(300, np.float32), np.ones(300, np.float32)
    pieces = [(0, 7), (7, 100), (107, 1), (108, 150)]  # up to 258

    kernel.run_list([[memory[at:].ctypes.data, ones.ctypes.data, n] for at, n in pieces], threads=3)

    assert (memory[:258] == -1).all()
    assert (memory[258:] == 0).all()
