"""Kernels before and after a rewrite, run by the interpreter on the same random arrays."""

from __future__ import annotations

import numpy as np

from stator.loops import interp
from stator.loops.access import buffers
from stator.loops.interp import NUMPY
from stator.loops.ir import Kernel
from stator.loops.text import to_text
from stator.loops.verify import verify
from tests.fuzz.arguments import Array, evaluate, inputs
from tests.fuzz.compare import difference


def random_arrays(kernel: Kernel, sizes: dict[str, int], seed: int = 0) -> dict[str, Array]:
    """Small whole numbers in every buffer: sums of them are exact in every order."""
    random = np.random.default_rng(seed)
    return {
        buffer.name: random.integers(0, 9, evaluate(buffer.size, sizes)).astype(NUMPY[buffer.dtype])
        for buffer in buffers(kernel)
        if not buffer.is_scratch
    }


def require_equal(before: Kernel, after: Kernel, sizes: dict[str, int] | None = None) -> None:
    """Two kernels over the same buffers store the same."""
    verify(after)
    known = sizes or {}
    expected = random_arrays(before, known)
    actual = {name: array.copy() for name, array in expected.items()}
    interp.run(before, expected, known)
    interp.run(after, actual, known)
    wrong = difference(before, actual, expected)
    assert wrong is None, f"{wrong}\n{to_text(before)}{to_text(after)}"


def require_equal_on_random(before: Kernel, after: Kernel, seed: int) -> None:
    """The same on arguments with NaN, infinities and extreme integers."""
    verify(after)
    expected, sizes = inputs(before, seed)
    actual = {name: array.copy() for name, array in expected.items()}
    interp.run(before, expected, sizes)
    interp.run(after, actual, sizes)
    wrong = difference(before, actual, expected)
    assert wrong is None, f"{wrong}\n{to_text(before)}{to_text(after)}"
