"""What tuning is told of a program: each kernel with the sizes that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

pytest.importorskip("triton")

from stator import pipeline
from stator.codegen.llvm.backend import Entry
from stator.codegen.llvm.shape import arguments_of
from stator.codegen.triton import backend
from stator.codegen.triton.candidates import candidates
from stator.codegen.triton.kernel import write_kernel
from stator.codegen.triton.shape import Shape, shape_of
from stator.errors import StatorWarning
from stator.loops.ir import Kernel
from stator.runtime.loading import Code, Loading
from stator.runtime.memory import plan_memory


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


def test_memory_is_planned_while_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            seen.append(name)
            return function(*given)

        return call

    begin = backend.begin_gpu_kernels
    monkeypatch.setattr(
        backend,
        "begin_gpu_kernels",
        lambda *given: noted("waited", noted("begun", begin)(*given)),
    )
    monkeypatch.setattr(pipeline, "plan_memory", noted("memory", plan_memory))
    x = torch.randn(5)

    torch.testing.assert_close(compiled(torch.sin)(x), x.sin())
    assert seen == ["begun", "memory", "waited"]


def test_where_a_kernel_cannot_be_compiled_torch_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any) -> Any:
        def fail() -> NoReturn:
            raise RuntimeError("no machine code today")

        return fail

    monkeypatch.setattr(backend, "begin_gpu_kernels", begin)
    x = torch.randn(5)
    by = torch.compile(torch.sin, backend="stator", options={"codegen": "triton", "cache": False})

    with pytest.warns(StatorWarning, match="no machine code today"):
        torch.testing.assert_close(by(x), x.sin())
    with pytest.raises(BackendCompilerFailed, match=r"CompileError.*no machine code today"):
        compiled(lambda x: x.sin())(x)


def test_a_cards_kernels_are_loaded_once(
    codes: list[Code], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(lambda x: (x.exp(), x.sum(-1)))(torch.randn(6, 2000))
    kernels = list(codes[0].samples())
    monkeypatch.setattr(backend, "_loaded", {})
    monkeypatch.setattr(backend, "capability_of", lambda device: 90)
    monkeypatch.setattr(
        backend,
        "launchable",
        lambda made, device: [Entry(cubin.name, cubin) for _, _, cubin in made],
    )
    card = torch.device("cuda", 0)
    first, again = (backend.load_gpu_kernels(kernels, card) for _ in range(2))

    names = [write_kernel(kernel, shape_of(kernel)).name for kernel in kernels]
    assert [getattr(entry, "name", None) for entry in first] == names
    assert all(one is other for one, other in zip(first, again, strict=True))
