"""One kernel or a library's call: decided by what a card says that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stator.codegen.triton.kernel import Written
from stator.codegen.triton.timing import Clock, Way
from stator.codegen.triton.tune import Tuner
from stator.codegen.triton.tune_product import LibraryCall, ProductTrial, product_shape
from stator.loops.ir import Kernel
from stator.loops.parse import parse
from stator.schedule.canonical import canonical
from tests.codegen.triton.test_tune import Kept, MadeUp

JOINED = """
kernel joined
  buffer z: bf16[4096]
  buffer a: bf16[2048]
  buffer b: bf16[2048]
  outer i0: 64, i1: 64
  stage i2: 32
    acc0 sum= mul(a[32*i0 + i2], b[i1 + 64*i2])
  stage
    z[64*i0 + i1] = max(acc0, 0.0:f32)
"""
LOOPS = """
kernel loops
  buffer y: bf16[4096]
  buffer z: bf16[4096]
  outer i0: 4096
  stage
    z[i0] = max(y[i0], 0.0:f32)
"""
CALL = LibraryCall("y", torch.mm, (("a", (64, 32), (32, 1)), ("b", (32, 64), (64, 1))), (64, 64))
ONE, OTHER = (canonical(parse(text), any_length=False) for text in (JOINED, LOOPS))
TRIAL = ProductTrial(ONE, OTHER, CALL)


class Said:
    """A clock: 0.2 ms for what says nothing of itself."""

    def round(self, ways: Sequence[Way]) -> list[float]:
        """Seconds."""
        return [float(str(way() or 2e-4)) for way in ways]


@dataclass(frozen=True)
class WithMatrices(MadeUp):
    """A card on which one kernel takes so long."""

    seconds: float = 1e-4

    def clock(self) -> Clock:
        return Said()

    def ways(self, kernels: Sequence[tuple[Kernel, Written, bool]]) -> list[Callable[..., Any]]:
        self.asked.append(len(kernels))
        return [lambda *_: None] + [lambda *_: self.seconds] * (len(kernels) - 1)


def test_one_kernel_is_taken_where_it_is_quicker() -> None:
    notes: list[str] = []

    shape = product_shape(TRIAL, Tuner(WithMatrices(), Kept(), notes))

    assert shape == TRIAL.shapes[0]
    assert notes[0].startswith("y is one kernel with what follows it: 64x64x64 by 4 warps")
    assert "100.0 us, instead of 200.0 us by cuBLAS and a kernel" in notes[0]


def test_the_library_stays_where_it_is_not() -> None:
    notes: list[str] = []

    assert product_shape(TRIAL, Tuner(WithMatrices(seconds=3e-4), Kept(), notes)) is None
    assert notes[0].startswith("y stays with cuBLAS: 200.0 us by cuBLAS and a kernel, 300.0 us as")


def test_a_second_compilation_measures_nothing() -> None:
    card, kept = WithMatrices(), Kept()

    found = [product_shape(TRIAL, Tuner(card, kept, [])) for _ in range(2)]

    assert found[0] == found[1] is not None
    assert len(card.asked) == 1


@pytest.mark.parametrize("card", [WithMatrices(free=1), WithMatrices(recording=True)])
def test_what_cannot_be_measured_stays_with_the_library(card: WithMatrices) -> None:
    notes: list[str] = []

    assert product_shape(TRIAL, Tuner(card, Kept(), notes)) is None
    assert "y is not tuned" in notes[0]
    assert card.asked == []


def test_operands_that_lie_otherwise_are_another_question() -> None:
    turned = LibraryCall("y", torch.mm, (CALL.operands[0], ("b", (32, 64), (1, 32))), (64, 64))

    assert ProductTrial(ONE, OTHER, turned).digest != TRIAL.digest
