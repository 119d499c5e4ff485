"""Kernels of unknown sizes: compiled once, right at every size, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.copies import widened
from tests.ops.fused import torch_calls
from tests.parity import compare_gradient, compare_values, compiled, cotangent_of

SIZES: Final = (2, 3, 7, 16, 100, 1000)
WIDTH: Final = 24
VOCABULARY: Final = 50


@dataclass(frozen=True)
class Program:
    """A function, and inputs for a size; dimensions of that size are marked."""

    call: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    least: int = 2  # Dynamo makes a graph of its own where a part of the rows is a single one


def rows(n: int) -> tuple[Any, ...]:
    return (torch.randn(n, WIDTH, requires_grad=True),)


def columns(n: int) -> tuple[Any, ...]:
    return (torch.randn(WIDTH, n, requires_grad=True),)


def with_weights(n: int) -> tuple[Any, ...]:
    weight, bias = (torch.randn(WIDTH, requires_grad=True) for _ in range(2))
    return torch.randn(n, WIDTH, requires_grad=True), weight, bias


def two(n: int) -> tuple[Any, ...]:
    return tuple(torch.randn(n, WIDTH, requires_grad=True) for _ in range(2))


def scored(n: int) -> tuple[Any, ...]:
    return torch.randn(n, 11, requires_grad=True), torch.randint(0, 11, (n,))


def scored_widely(n: int) -> tuple[Any, ...]:
    return torch.randn(13, n, requires_grad=True), torch.randint(0, n, (13,))


def looked_up(n: int) -> tuple[Any, ...]:
    return torch.randint(0, VOCABULARY, (n,)), torch.randn(VOCABULARY, 8, requires_grad=True)


def cube(n: int) -> tuple[Any, ...]:
    return (torch.randn(6, n, 5, requires_grad=True),)


def gelu_with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x * weight + bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.rms_norm(x, (WIDTH,), weight) + bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), weight, bias)


PROGRAMS: Final[dict[str, Program]] = {
    "softmax": Program(lambda x: x.softmax(-1), rows),
    "softmax of unknown rows": Program(lambda x: x.softmax(-1), columns),
    "softmax along columns": Program(lambda x: x.softmax(0), rows),
    "log softmax": Program(lambda x: x.log_softmax(-1), columns),
    "layer norm": Program(layer_norm, with_weights),
    "layer norm of unknown rows": Program(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt(),
        columns,
    ),
    "rms norm": Program(rms_norm, with_weights),
    "cross entropy": Program(functional.cross_entropy, scored),
    "cross entropy of unknown classes": Program(functional.cross_entropy, scored_widely),
    "gelu with bias": Program(gelu_with_bias, with_weights),
    "cat of rows": Program(lambda x, y: torch.cat([x, y * 2, x]), two),
    "cat of columns": Program(lambda x, y: torch.cat([x.exp(), y], 1) * 2, two),
    "cat with a number of rows": Program(lambda x: torch.cat([x[:2], x]) + 1, rows),
    "slices": Program(lambda x: x[1:] * x[:-1], rows, least=3),
    "every second": Program(lambda x: x[::2].exp(), rows, least=3),
    "slices of columns": Program(lambda x: x[:, 1:] - x[:, :-1], columns, least=3),
    "mean": Program(lambda x: x.mean(), rows),
    "mean over rows": Program(lambda x: x.mean(0), rows),
    "mean over columns": Program(lambda x: x.mean(1), columns),
    "variance": Program(lambda x: x.var(0), rows),
    "embedding": Program(functional.embedding, looked_up),
    "transposed": Program(lambda x: x.t().contiguous() * 2, rows),
    "transposed and added": Program(lambda x: x.transpose(1, 2) + 1, cube),
    "permuted": Program(lambda x: x.permute(2, 0, 1).exp().contiguous(), cube),
    "flattened": Program(lambda x: x.reshape(-1, 5).tanh(), cube),
    "halves": Program(lambda x: torch.cat([-x[..., 12:], x[..., :12]], -1), rows),
    "running sum": Program(lambda x: x.cumsum(1), cube),
    "running sum of unknown rows": Program(lambda x: x.cumsum(-1), columns),
    "masked": Program(lambda x: x.masked_fill(x > 0, 0.5), rows),
    "triangle": Program(lambda x: torch.tril(x) * 2, columns),
    "padded": Program(lambda x: functional.pad(x, (0, 0, 1, 2)) + 1, rows),
    "size as a number": Program(lambda x: x * x.size(0) + x.size(1) // 2, rows),
    "positions": Program(lambda x: x + torch.arange(x.size(0))[:, None], rows),
    "mean square": Program(lambda x, y: functional.mse_loss(x, y), two),
    "maximum": Program(lambda x: x.amax(1), columns),
}


def leaves(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [value for value in inputs if value.requires_grad]


def run(call: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Tensor, list[Any]]:
    """The result and all gradients."""
    output = call(*inputs)
    output.backward(cotangent_of(output, 1))
    return output.detach(), [leaf.grad for leaf in leaves(inputs)]


def fresh(inputs: tuple[Any, ...], wide: bool = False) -> tuple[Any, ...]:
    return tuple(
        (widened(value.detach()) if wide else value.detach().clone()).requires_grad_(
            value.requires_grad
        )
        for value in inputs
    )


def require_right(call: Callable[..., Any], program: Program, size: int) -> None:
    """Result and gradients at one size are eager's."""
    torch.manual_seed(size)
    inputs = program.inputs(size)
    truth, truths = run(program.call, fresh(inputs, wide=True))
    expected, gradients = run(program.call, fresh(inputs))
    output, mine = run(call, marked(fresh(inputs), size))
    assert output.stride() == expected.stride()
    compare_values(output, expected, truth, f"output at {size}")
    for place, gradient in enumerate(gradients):
        compare_gradient(mine[place], gradient, truths[place], f"gradient {place} at {size}")


def graphs() -> int:
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def marked(inputs: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Inputs whose dimensions of `size` are marked as unknown."""
    for value in inputs:
        for dim, length in enumerate(value.shape):
            if length == size:
                torch._dynamo.mark_dynamic(value, dim)
    return inputs


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_every_size(name: str) -> None:
    program = PROGRAMS[name]
    ours = compiled(program.call, fullgraph=True)

    for size in SIZES:
        if size >= program.least:
            require_right(ours, program, size)

    assert graphs() == 1
    assert not torch_calls()


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_sizes_unknown_are_right_as_well(name: str) -> None:
    """Those too that never change."""
    program = PROGRAMS[name]
    ours = compiled(program.call, fullgraph=True, dynamic=True)

    for size in (7, 3, 100):
        require_right(ours, program, size)

    assert graphs() == 1


@pytest.mark.parametrize("name", ["softmax", "rms norm", "cat of rows", "mean over rows"])
def test_a_size_that_changes_is_compiled_once_more(name: str) -> None:
    program = PROGRAMS[name]
    ours = compiled(program.call, fullgraph=True)

    for size in SIZES:
        inputs = program.inputs(size)
        torch.testing.assert_close(ours(*inputs), program.call(*inputs))

    assert graphs() == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax of unknown rows", "layer norm", "gelu with bias"])
def test_other_types_are_right_at_every_size(name: str, dtype: torch.dtype) -> None:
    base = PROGRAMS[name]

    def inputs(n: int) -> tuple[Any, ...]:
        return tuple(v.detach().to(dtype).requires_grad_() for v in base.inputs(n))

    program = Program(base.call, inputs)
    ours = compiled(program.call, fullgraph=True, dynamic=True)

    for size in (2, 7, 100):
        require_right(ours, program, size)
    assert graphs() == 1


NUMBERS: Final[dict[str, Callable[[Tensor, int], Tensor]]] = {
    "added": lambda x, k: x + k,
    "half of it": lambda x, k: x * (k // 2),
    "its remainder": lambda x, k: x + k % 3,
    "sliced from it": lambda x, k: x[:, k:].sum(1),
    "sliced up to it": lambda x, k: x[:, :k].exp(),
    "rolled by it": lambda x, k: torch.roll(x, k, 1),
    "positions from it": lambda x, k: x + torch.arange(k, k + 10),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_either_sign_is_right(name: str) -> None:
    """An integer argument is no size: it may be negative, also in a graph made for another."""
    fn = NUMBERS[name]
    ours = compiled(fn, dynamic=True)
    x = torch.randn(6, 10)

    for k in (5, -3, -7, 4, -4):
        torch.testing.assert_close(ours(x, k), fn(x, k))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sums_of_unknown_length_are_as_exact_as_eager_s(dtype: torch.dtype, dim: int) -> None:
    ours = compiled(lambda x: x.sum(dim), dynamic=True)

    for length in (3, 7, 16, 33, 100, 255, 300, 700, 1500):
        size = (length, 200) if dim == 0 else (200, length)
        x = torch.randn(size, generator=torch.Generator().manual_seed(length)).to(dtype)
        compare_values(ours(x), x.sum(dim), x.double().sum(dim), f"sum of {length}")
    assert graphs() == 1


def test_rows_with_gaps_are_right() -> None:
    program = PROGRAMS["softmax"]
    ours = compiled(program.call, dynamic=True)

    for size in (7, 33):
        x = torch.randn(2 * size, 2 * WIDTH)[::2, 1::2]
        torch.testing.assert_close(ours(x), program.call(x))


def test_two_sizes_that_happen_to_be_equal_are_two_sizes() -> None:
    """Dynamo takes equal sizes for one symbol; then others compile once more."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.softmax(-1), y.exp()])

    ours = compiled(fn, dynamic=True)

    for first, second in ((5, 5), (5, 7), (16, 3), (7, 7)):
        x, y = torch.randn(first, 9), torch.randn(second, 9)
        torch.testing.assert_close(ours(x, y), fn(x, y))
    assert graphs() <= 2
