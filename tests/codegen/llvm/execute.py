"""Kernels run by the interpreter and as machine code, on the same arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stator.codegen.llvm import jit
from stator.codegen.llvm.shape import arguments_of, symbols_of
from stator.core.dtypes import DType
from stator.loops import interp
from stator.loops.access import buffers
from stator.loops.interp import NUMPY, bf16_bits
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.loops.text import to_text
from stator.loops.verify import verify
from tests.fuzz.arguments import Array, evaluate, overrun, with_margins
from tests.fuzz.compare import difference

ODD: Final = (1, 15, 16, 17, 33)  # around the vectors of every type, and around tiles
TYPES: Final = tuple(DType)
FLOATS: Final = tuple(dtype for dtype in DType if dtype.is_float)
THREADS: Final = (1, 2, 5)


@dataclass
class Compiled:
    """A kernel with its machine code."""

    kernel: Kernel
    below: Mapping[str, int] = field(default_factory=dict)  # buffers of places, and their limits

    def __post_init__(self) -> None:
        verify(self.kernel)
        self.module = jit.load([self.kernel])

    def arrays(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
        """Random contents of every buffer."""
        random = np.random.default_rng(seed)
        found = {}
        for buffer in buffers(self.kernel):
            if not buffer.is_scratch:
                length = evaluate(buffer.size, sizes)
                found[buffer.name] = contents(
                    buffer.dtype, length, random, self.below.get(buffer.name)
                )
        for written, read in self.kernel.shares:
            found[written.name] = found[read.name].copy()
        return found

    def require(
        self,
        sizes: Mapping[str, int] | None = None,
        threads: Sequence[int] = THREADS,
        arrays: dict[str, Array] | None = None,
    ) -> None:
        """Machine code must store what the interpreter does, on any number of threads."""
        known = dict(sizes or {})
        given = self.arrays(known) if arrays is None else arrays
        expected = {name: array.copy() for name, array in given.items()}
        interp.run(self.kernel, expected, known)
        for count in threads:
            actual, memory = with_margins(given)
            self.run(actual, known, count)
            wrong = overrun(memory) or difference(self.kernel, actual, expected)
            assert wrong is None, f"{wrong}; sizes {known}, {count} threads\n{to_text(self.kernel)}"

    def run(self, arrays: Mapping[str, Array], sizes: Mapping[str, int], threads: int) -> None:
        """Run the machine code once."""
        self.module.entries[self.kernel.name](*self.given(arrays, sizes), threads)

    def given(self, arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> list[int]:
        """Addresses and sizes, as the entry takes them."""
        addresses = [arrays[buffer.name].ctypes.data for buffer in arguments_of(self.kernel)]
        return addresses + [sizes[symbol.name] for symbol in symbols_of(self.kernel)]

    def run_list(self, lines: Sequence[list[int]], threads: int) -> None:
        """Run a kernel over a list once."""
        cells = [cell for line in lines for cell in line]
        table = (ctypes.c_int64 * max(len(cells), 1))(*cells)
        self.module.entries[self.kernel.name](table, len(lines), threads)


def compiled(text: str, **below: int) -> Compiled:
    """The kernel that a text stands for; `below` are limits of buffers that hold places."""
    return Compiled(parse(text), below)


def contents(dtype: DType, length: int, random: Any, below: int | None = None) -> Array:
    """Small numbers, all of which every type holds; places below a limit."""
    if below is not None:
        return np.asarray(random.integers(0, below, length).astype(NUMPY[dtype]))
    if dtype is DType.BOOL:
        return np.asarray(random.integers(0, 2, length).astype(np.bool_))
    if not dtype.is_float:
        return np.asarray(random.integers(0, 10, length).astype(NUMPY[dtype]))
    values = random.integers(-32, 33, length) / 8
    if dtype is DType.BF16:
        return np.array([bf16_bits(float(value)) for value in values], np.uint16)
    return np.asarray(values.astype(NUMPY[dtype]))
