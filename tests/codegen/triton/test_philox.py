"""Random words in Triton: the reference's for whatever numbers, and cheap where they are a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from stator.codegen.triton.kernel import source_of, write_kernel
from stator.codegen.triton.shape import Shape, shape_of
from stator.core.dtypes import DType
from stator.loops.build import Body, cast, const
from stator.loops.index import Axis, Index, Symbol
from stator.loops.ir import (
    Accumulate,
    Accumulated,
    Buffer,
    Combine,
    Expr,
    IndexValue,
    Kernel,
    Load,
    Stage,
    Store,
)
from stator.loops.philox import philox_one
from tests.loops.test_philox import KNOWN, WORD

pytest.importorskip("triton")

from stator.codegen.triton.compile import compile_all
from stator.codegen.triton.interpreted import interpreted
from stator.loops import interp

Make = Callable[..., Index]

_b = Body()
SEED: Final = Buffer("seed", DType.I32, Index.of(2))
STREAM: Final = 9


def word(number: Index, *, is_far: bool = False) -> Expr:
    """That of a number, which may be beyond 32 bits."""
    key = [Load(DType.I32, SEED, Index.of(n)) for n in range(2)]
    above = IndexValue(DType.I32, number // (1 << 32)) if is_far else const(0, DType.I32)
    return _b.philox_one(*key, const(STREAM, DType.I32), IndexValue(DType.I32, number), above)


def flat(
    sizes: tuple[int, ...], number: Make, place: Make, dtype: DType, *, is_far: bool = False
) -> Kernel:
    """Words of numbers, stored at places: both functions of the axes."""
    axes = tuple(Axis(f"i{n}", Index.of(size)) for n, size in enumerate(sizes))
    points = [Index.of(axis) for axis in axes]
    out = Buffer("out", dtype, Index.of(math.prod(sizes)))
    made = word(number(*points), is_far=is_far)
    return Kernel(
        "words", axes, (Stage((), (Store(out, place(*points), converted(made, dtype)),)),)
    )


def converted(value: Expr, dtype: DType) -> Expr:
    return value if dtype is DType.I32 else cast(value, dtype)


def rows(count: int, length: int, dtype: DType) -> Kernel:
    """How far each word is below the largest one of its row."""
    row, first, second = (
        Axis(name, Index.of(n)) for name, n in (("i0", count), ("i1", length), ("i2", length))
    )
    out = Buffer("out", dtype, Index.of(count * length))
    largest = Accumulate("acc0", Combine.MAX, word(Index.of(row) * length + Index.of(first)))
    at = Index.of(row) * length + Index.of(second)
    below = _b.sub(word(at), Accumulated(DType.I32, "acc0"))
    store = Store(out, at, converted(below, dtype))
    return Kernel("rows", (row,), (Stage((first,), (largest,)), Stage((second,), (store,))))


def agree(kernel: Kernel, shape: Shape | None) -> None:
    """Triton's interpreter gives what the oracle gives."""
    (out,) = kernel.written
    kind = {DType.I32: np.int32, DType.I16: np.int16}[out.dtype]
    memory = {"seed": np.array([5, -6], np.int32), "out": np.zeros(out.size.constant or 0, kind)}
    expected = {name: array.copy() for name, array in memory.items()}
    interp.run(kernel, expected, {})

    places = [memory[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]
    interpreted(kernel, shape)(*places, 1)

    np.testing.assert_array_equal(memory["out"], expected["out"])


# Sizes, numbers, places, whether numbers follow each other in quarters.
FLAT: Final[dict[str, tuple[tuple[int, ...], Make, Make, bool]]] = {
    "odd length": ((1003,), lambda i: i, lambda i: i, True),
    "offset by quarters": ((300,), lambda i: i + 12, lambda i: i, True),
    "offset": ((300,), lambda i: i + 3, lambda i: i, False),
    "every other": ((300,), lambda i: i * 2, lambda i: i, False),
    "stored by columns": ((5, 36), lambda i, j: i * 36 + j, lambda i, j: i + j * 5, True),
    "rows with gaps": ((5, 36), lambda i, j: i * 42 + j, lambda i, j: i * 36 + j, False),
    "numbered by columns": ((36, 5), lambda i, j: i + j * 36, lambda i, j: i * 5 + j, False),
}
FAR: Final = {
    "beyond 32 bits": ((300,), lambda i: i + (1 << 34) - 100, lambda i: i, True),
    "beyond and apart": ((300,), lambda i: i * 3 + (1 << 34) - 7, lambda i: i, False),
}
BLOCK: Final = Shape("flat", 256, 1, 1)  # eight elements for a thread


@pytest.mark.parametrize("name", [*FLAT, *FAR])
@pytest.mark.parametrize(
    ("dtype", "shared"), [(DType.I32, "philox_fours"), (DType.I16, "philox_eights")], ids=str
)
def test_numbers_in_any_order(name: str, dtype: DType, shared: str) -> None:
    sizes, number, place, is_shared = {**FLAT, **FAR}[name]
    kernel = flat(sizes, number, place, dtype, is_far=name in FAR)

    assert (shared in source_of(kernel, BLOCK)) == is_shared
    agree(kernel, BLOCK)


@pytest.mark.parametrize("dtype", [DType.I32, DType.I16], ids=str)
@pytest.mark.parametrize(("length", "is_shared"), [(36, True), (37, False), (3, False)])
@pytest.mark.parametrize("shape", [None, Shape("rows", 1, 16, 1)], ids=["whole", "in blocks"])
def test_rows(length: int, is_shared: bool, dtype: DType, shape: Shape | None) -> None:
    kernel = rows(5, length, dtype)

    assert ("tl.reshape(philox_" in source_of(kernel, shape)) == is_shared
    agree(kernel, shape)


def test_a_size_that_is_not_known_shares_words_as_well() -> None:
    size = Index.of(Symbol("s0"))
    axis, out = Axis("i0", size), Buffer("out", DType.I32, size)
    at = Index.of(axis)
    kernel = Kernel("any", (axis,), (Stage((), (Store(out, at, word(at, is_far=True)),)),))
    memory = {"seed": np.array([5, -6], np.int32), "out": np.zeros(77, np.int32)}
    places = [memory[b.name].ctypes.data for b in (*kernel.written, *kernel.read)]

    interpreted(kernel)(*places, 77, 1)

    assert "philox_fours" in source_of(kernel)
    expected = [philox_one((5, -6 & WORD), STREAM, (n, 0)) for n in range(77)]
    assert (memory["out"].astype(np.int64) & WORD).tolist() == expected


def test_known_answers() -> None:
    kernel = flat((4,), lambda i: i, lambda i: i, DType.I32)
    (stage,) = kernel.stages
    zeros = dict.fromkeys(range(3), const(0, DType.I32))
    number = IndexValue(DType.I32, Index.of(kernel.outer[0]))
    value = _b.philox_one(*zeros.values(), number, const(0, DType.I32))
    (store,) = stage.body
    kernel = replace(kernel, stages=(Stage((), (replace(store, value=value),)),))
    out = np.zeros(4, np.int32)

    interpreted(kernel)(out.ctypes.data, 1)

    assert tuple((out.astype(np.int64) & WORD).tolist()) == KNOWN[0][2]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=str)
@pytest.mark.parametrize("is_known", [True, False], ids=["of a size", "of any size"])
def test_on_a_card_words_stay_in_the_registers_of_their_threads(
    dtype: DType, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shared memory: blocks of words lie as those of what is loaded and stored."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size = Index.of(1 << 24) if is_known else Index.of(Symbol("s0"))
    axis, x, y = Axis("i0", size), Buffer("x", dtype, size), Buffer("y", dtype, size)
    at = Index.of(axis)
    kept = cast(_b.lt(word(at, is_far=not is_known), 1 << 30), DType.F32)
    store = Store(y, at, _b.mul(Load(DType.F32, x, at), kept))
    kernel = Kernel("dropped", (axis,), (Stage((), (store,)),))

    (cubin,) = compile_all([write_kernel(kernel, shape_of(kernel))], 90)

    assert cubin.shared == 0
