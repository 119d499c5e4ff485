"""What tuning is told of a program: each kernel with the sizes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stator.codegen.llvm.shape import arguments_of
from stator.codegen.triton import backend
from stator.codegen.triton.candidates import candidates
from stator.codegen.triton.shape import Shape
from stator.loops.ir import Kernel
from stator.runtime.loading import Code, Loading


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Code]:
    """What is loaded meanwhile, each kernel in the last of its candidates."""
    seen: list[Code] = []

    def last(self: Code, loading: Loading, notes: list[str]) -> dict[Kernel, Shape]:
        seen.append(self)
        return {kernel: candidates(kernel)[-1] for kernel in self.samples()}

    monkeypatch.setattr(Code, "tuned", last)
    return seen


def compiled(fn: Any, dynamic: bool | None = None) -> Any:
    """By Triton's interpreter."""
    options = {"codegen": "triton", "strict": True, "cache": False}
    return torch.compile(fn, backend="stator", options=options, dynamic=dynamic)


def lengths(codes: Sequence[Code]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements of buffers and sizes of each kernel."""
    return [(s.lengths, s.sizes) for code in codes for s in code.samples().values()]


def test_a_kernel_is_tried_on_as_much_as_the_program_gives_it(codes: list[Code]) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x.t() + y, -1)

    x, y = torch.randn(5, 7), torch.randn(5)

    torch.testing.assert_close(compiled(fn)(x, y), fn(x, y))
    ((found, sizes),) = lengths(codes)
    assert sorted(found) == [5, 35, 35]
    assert sizes == ()


def test_sizes_are_those_of_the_first_call(codes: list[Code]) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sum(-1) * 2

    x = torch.randn(6, 10)

    torch.testing.assert_close(compiled(fn, dynamic=True)(x), fn(x))
    for code in codes:
        for kernel, sample in code.samples().items():
            assert len(sample.lengths) == len(arguments_of(kernel))
            assert set(sample.lengths) <= {6, 60}
            assert set(sample.sizes) <= {6, 10}


def test_what_is_written_in_place_has_its_size(codes: list[Code]) -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return torch.layer_norm(x + 1, [8])

    x = torch.randn(3, 8)
    expected, own = x.clone(), x.clone()

    torch.testing.assert_close(compiled(fn)(own), fn(expected))
    torch.testing.assert_close(own, expected)
    assert all(set(found) <= {3, 24} for found, _ in lengths(codes))


def test_equal_kernels_in_other_shapes_are_loaded_each(codes: list[Code]) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.exp(x)

    x = torch.randn(2000)
    torch.testing.assert_close(compiled(fn)(x), fn(x))

    kernel, *_ = codes[0].samples()
    cpu = torch.device("cpu")
    (model,) = backend.load_gpu_kernels([kernel], cpu)
    (other,) = backend.load_gpu_kernels([kernel], cpu, shapes={kernel: candidates(kernel)[-1]})

    assert model is not other
    assert model.shape != other.shape
