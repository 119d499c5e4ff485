"""Kernels in shapes that were measured: right in every shape, measured once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import stator
from stator.cache import verdicts
from stator.codegen.triton.candidates import MOST, candidates
from stator.codegen.triton.shape import Shape
from stator.core.events import last_compilation
from stator.loops.ir import Kernel
from stator.runtime.loading import Code, Loading
from tests.gpu.on_device import DEVICE, OPTIONS, WHERE, check, compiled, needs_card, randn


def normed(x: Tensor, y: Tensor) -> Tensor:
    """Rows, with work around them."""
    return functional.layer_norm(functional.gelu(x) + y, [x.size(-1)])


def turned(x: Tensor, y: Tensor) -> Tensor:
    """Tiles, then columns."""
    return (x.t().contiguous() * 2 + y.t()).sum(0)


def softmaxed(x: Tensor, y: Tensor) -> Tensor:
    """Rows that a loop goes through in one pass, or two."""
    return torch.softmax(x * 3, -1) * y


CASES: Final[tuple[Callable[..., Tensor], ...]] = (normed, turned, softmaxed)


@pytest.mark.skipif(WHERE == "cpu", reason="a CPU's kernels have one shape")
@pytest.mark.parametrize("number", range(MOST))
@pytest.mark.parametrize("fn", CASES)
def test_programs_are_right_in_every_shape(
    fn: Callable[..., Tensor], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(self: Code, loading: Loading, notes: list[str]) -> dict[Kernel, Shape]:
        ways = {kernel: candidates(kernel) for kernel in self.samples()}
        return {kernel: shapes[number % len(shapes)] for kernel, shapes in ways.items()}

    monkeypatch.setattr(Code, "tuned", forced)
    x, y = (randn(37, 1301, dtype=torch.bfloat16) for _ in range(2))

    check(fn, x, y, options={"cache": False})


@pytest.mark.skipif(WHERE == "cpu", reason="a CPU's kernels have one shape")
def test_without_a_card_nothing_is_measured() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("there is one")
    x = randn(600, 1024)

    told = stator.explain(lambda x: torch.softmax(x, -1), x, options={**OPTIONS, "tune": True})

    assert "shapes measured" not in str(told)


def notes_of(fn: Callable[..., Any], *inputs: Any, **options: Any) -> list[str]:
    """What a compilation says of shapes; results are compared with float64."""
    torch._dynamo.reset()
    found = compiled(fn, "max-autotune-no-cudagraphs", **options)(*inputs)
    expected = fn(*(x.double() for x in inputs))
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.02)
    record = last_compilation()
    assert record is not None
    return [note for note in record.notes if "shapes measured" in note]


@needs_card
@pytest.mark.parametrize("fn", CASES)
def test_kernels_are_measured_once(
    fn: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (randn(1024, 2048, dtype=torch.bfloat16) for _ in range(2))
    monkeypatch.setattr(verdicts, "_found", {})
    # Programs are not kept: the second compilation asks for every shape again.
    settings = {"cache": True, "cache_dir": tmp_path, "profile_ranges": True}

    first = notes_of(fn, x, y, **settings)
    monkeypatch.setattr(verdicts, "_found", {})  # as in another process
    monkeypatch.setattr("stator.codegen.triton.tune.quickest", None)
    second = notes_of(fn, x, y, **settings)

    assert first
    assert second == first


@needs_card
def test_the_caller_s_tensors_and_numbers_stay_as_they_are() -> None:
    def update(x: Tensor) -> Tensor:
        x.mul_(0.5)
        return torch.dropout(x, 0.5, True)

    x = randn(2048, 2048)
    halved = x * 0.5
    torch.manual_seed(3)
    plain = compiled(update, cache=False)(x.clone())
    torch._dynamo.reset()
    torch.manual_seed(3)

    tuned = compiled(update, "max-autotune-no-cudagraphs", cache=False)(x)

    assert torch.equal(x, halved)
    assert torch.equal(tuned, plain)
