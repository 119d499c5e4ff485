"""Philox in machine code: every word that the reference gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stator.codegen.llvm.backend import load_kernels
from stator.codegen.llvm.shape import arguments_of
from stator.core.dtypes import DType
from stator.loops.build import apply
from stator.loops.index import Axis, Index
from stator.loops.ir import Buffer, Kernel, Load, Stage, Store
from stator.loops.philox import philox_one
from stator.loops.prims import Prim
from tests.loops.test_philox import KNOWN, WORD


def computed(words: list[Tensor]) -> Tensor:
    """What a kernel gives for keys, streams and numbers, in 64 bits."""
    axis = Axis("i0", Index.of(len(words[0])))
    at, size = Index.of(axis), axis.size
    loads = [Load(DType.I32, Buffer(f"word{n}", DType.I32, size), at) for n in range(5)]
    store = Store(Buffer("out", DType.I32, size), at, apply(Prim.PHILOX_ONE, *loads))
    kernel = Kernel("kernel", (axis,), (Stage((), (store,)),))
    tensors = {f"word{n}": word.to(torch.int32) for n, word in enumerate(words)}
    tensors["out"] = torch.empty(len(words[0]), dtype=torch.int32)
    (entry,) = (found.function for found in load_kernels([kernel]))
    entry(*(tensors[buffer.name].data_ptr() for buffer in arguments_of(kernel)), 1)
    return tensors["out"].to(torch.int64) & WORD


@pytest.mark.parametrize("count", [1, 7, 1000])  # alone, less than a vector, many
def test_words_are_those_of_the_reference(count: int) -> None:
    words = [torch.randint(0, 1 << 32, (count,)) for _ in range(5)]
    expected = philox_one((words[0], words[1]), words[2], (words[3], words[4]))

    assert computed(words).tolist() == expected.tolist()


def test_known_answers() -> None:
    zeros = torch.zeros(4, dtype=torch.int64)

    assert tuple(computed([zeros, zeros, zeros, torch.arange(4), zeros]).tolist()) == KNOWN[0][2]
