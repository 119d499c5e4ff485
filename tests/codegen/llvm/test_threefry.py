"""Threefry in machine code: every word that the reference gives, and rotations of the machine."""

from __future__ import annotations

import platform
import re
from typing import Final

import pytest
import torch
from torch import Tensor

from stator.codegen.llvm.backend import load_kernels
from stator.codegen.llvm.jit import assembly
from stator.codegen.llvm.shape import arguments_of
from stator.core.dtypes import DType
from stator.loops.build import apply
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Kernel, Load, Stage, Store
from stator.loops.prims import Prim
from stator.loops.threefry import threefry, threefry_one
from tests.loops.test_threefry import KNOWN

COUNT: Final = 1000
WORDS: Final = {
    "first": Prim.THREEFRY_0,
    "second": Prim.THREEFRY_1,
    "one": Prim.THREEFRY_ONE,
}


def kernel(count: int) -> Kernel:
    """Both words for `count` keys and counters, and the one of a number."""
    axis = Axis("i0", Index.of(count))
    at, size = Index.of(axis), Index.of(count)
    words = [Load(DType.I32, Buffer(f"word{n}", DType.I32, size), at) for n in range(4)]
    stores = tuple(
        Store(Buffer(name, DType.I32, size), at, apply(prim, *words))
        for name, prim in WORDS.items()
    )
    return Kernel("kernel", (axis,), (Stage((), stores),))


def computed(words: list[Tensor]) -> list[Tensor]:
    """The kernel's words, in 64 bits."""
    count = len(words[0])
    tensors = {f"word{n}": word.to(torch.int32) for n, word in enumerate(words)}
    tensors |= {name: torch.empty(count, dtype=torch.int32) for name in WORDS}
    made = kernel(count)
    (entry,) = (found.function for found in load_kernels([made]))
    entry(*(tensors[buffer.name].data_ptr() for buffer in arguments_of(made)), 1)
    return [tensors[name].to(torch.int64) & 0xFFFFFFFF for name in WORDS]


@pytest.mark.parametrize("count", [1, 7, COUNT])  # alone, less than a vector, many
def test_words_are_those_of_the_reference(count: int) -> None:
    words = [torch.randint(0, 1 << 32, (count,)) for _ in range(4)]
    key, counter = (words[0], words[1]), (words[2], words[3])
    expected = [*threefry(key, counter), threefry_one(key, counter)]

    assert [word.tolist() for word in computed(words)] == [word.tolist() for word in expected]


def test_known_answers() -> None:
    given = torch.tensor([(*key, *counter) for key, counter, _ in KNOWN]).t()

    assert torch.stack(computed(list(given))[:2], 1).tolist() == [list(known[2]) for known in KNOWN]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 names its rotations so")
def test_both_words_come_from_the_same_rounds_and_shifts_become_rotations() -> None:
    text = assembly([kernel(COUNT)])

    assert re.search(r"\bv?pro[lr]|\bro[lr]|\brorx", text)
    rounds = len(re.findall(r"\bvprold\b", text)) or 20  # without AVX-512 they look otherwise
    assert rounds <= 80  # a loop of vectors and its rest, for both words and for the third
