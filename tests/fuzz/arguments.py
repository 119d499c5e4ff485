"""Arguments for random kernels: sizes, arrays, and room around them that nobody may touch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from stator.core.dtypes import DType
from stator.loops.access import buffers, header_sizes, indices, symbols
from stator.loops.index import Index, Quotient, Remainder, Symbol
from stator.loops.interp import NUMPY, bf16_bits
from stator.loops.ir import Kernel
from tests.fuzz.expressions import LIMIT, STEP

Array: TypeAlias = "np.ndarray[Any, Any]"

SYMBOL_VALUES: Final = (3, 1, 2, 5, 8, 16, 17, 40, 0)
POINTS: Final = 300  # that a kernel may have, about: the interpreter is slow
MARGIN: Final = 64  # bytes before and behind an array
_UNTOUCHED: Final = 0xA5


def inputs(kernel: Kernel, seed: int) -> tuple[dict[str, Array], dict[str, int]]:
    """Arrays by buffer name and numbers by symbol name.

    Floats are small multiples of a power of two; some arrays hold NaN and infinities as well, or
    the extreme integers.
    """
    random = np.random.default_rng(seed)
    sizes = _sizes(kernel, random)
    arrays = {
        buffer.name: _array(buffer.dtype, max(evaluate(buffer.size, sizes), 0), random)
        for buffer in buffers(kernel)
        if not buffer.is_scratch
    }
    for written, read in kernel.shares:
        arrays[written.name][:] = arrays[read.name]
    return arrays, sizes


def evaluate(index: Index, sizes: Mapping[str, int]) -> int:
    """The number that a size is."""
    total = 0
    for product, factor in index.terms:
        for atom in product:
            match atom:
                case Symbol():
                    factor *= sizes[atom.name]
                case Quotient():
                    factor *= evaluate(atom.value, sizes) // evaluate(atom.by, sizes)
                case Remainder():
                    factor *= evaluate(atom.value, sizes) % evaluate(atom.by, sizes)
                case _:
                    raise AssertionError(f"{atom} is in a size")
        total += factor
    return total


def points(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """How many times the kernel's stages iterate, in all."""
    outer = int(np.prod([evaluate(axis.size, sizes) for axis in kernel.outer]))
    return outer * sum(
        int(np.prod([evaluate(axis.size, sizes) for axis in stage.inner]))
        for stage in kernel.stages
    )


def share_memory(kernel: Kernel, arrays: dict[str, Array]) -> None:
    """Let buffers that lie in the same memory do so."""
    for written, read in kernel.shares:
        arrays[read.name] = arrays[written.name]


def with_margins(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Copies of arrays, and the memory that each lies in, marked where it is not the array's."""
    inside, whole = {}, {}
    for name, array in arrays.items():
        memory = np.full(array.nbytes + 2 * MARGIN, _UNTOUCHED, np.uint8)
        own = memory[MARGIN : MARGIN + array.nbytes].view(array.dtype)
        own[:] = array
        inside[name], whole[name] = own, memory
    return inside, whole


def overrun(whole: Mapping[str, Array]) -> str | None:
    """The buffer beside which something was written; None if there is none."""
    for name, memory in whole.items():
        if not (memory[:MARGIN] == _UNTOUCHED).all():
            return f"{name} is written to before its beginning"
        if not (memory[len(memory) - MARGIN :] == _UNTOUCHED).all():
            return f"{name} is written to behind its end"
    return None


def _sizes(kernel: Kernel, random: np.random.Generator) -> dict[str, int]:
    used = [*header_sizes(kernel), *(i for s in kernel.statements for i in indices(s))]
    found = {symbol for index in used for symbol in symbols(index)}
    numbers = {s.name: int(random.integers(-6, 7)) for s in sorted(found, key=str) if s.is_signed}
    names = sorted(symbol.name for symbol in found if not symbol.is_signed)
    sizes = {name: int(random.choice(SYMBOL_VALUES)) for name in names}
    while points(kernel, sizes) > POINTS and max(sizes.values(), default=0) > 1:
        largest = max(sizes, key=lambda name: sizes[name])
        sizes[largest] //= 2
    return sizes | numbers


def _array(dtype: DType, length: int, random: np.random.Generator) -> Array:
    if dtype is DType.BOOL:
        return random.integers(0, 2, length).astype(np.bool_)
    has_special = random.integers(0, 4) == 0
    where = random.integers(0, 12, length) == 0
    if not dtype.is_float:
        limits = np.iinfo(NUMPY[dtype])
        small = random.integers(-9 if limits.min < 0 else 0, 10, length)
        extreme = random.choice([limits.min, limits.max], length)
        return np.where(has_special & where, extreme, small).astype(NUMPY[dtype])
    steps = int(LIMIT / STEP)
    plain = random.integers(-steps, steps + 1, length) * STEP
    special = random.choice([np.nan, np.inf, -np.inf, -0.0, -0.0], length)
    values = np.where(has_special & where, special, plain)
    if dtype is DType.BF16:
        return np.array([bf16_bits(float(value)) for value in values], np.uint16)
    return values.astype(NUMPY[dtype])
