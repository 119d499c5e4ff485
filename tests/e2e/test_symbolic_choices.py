"""Windows, joins, borders and numbers of unknown sizes, as machine code: forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.copies import widened
from tests.ops.fused import torch_calls
from tests.parity import compare_gradient, compare_values, compiled, cotangent_of

SIZES: Final = ((9, 40), (2, 2), (3, 7), (8, 16), (5, 33), (16, 130), (2, 65))
# Dynamo sets apart results of one row or column; before torch 2.13, also odd sizes behind windows
# and the exponent of a root.
IS_OLD: Final = torch.__version__ < (2, 13)


def halves_turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * 2 + torch.cat((-high, low), -1) * x


PROGRAMS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "largest of 3 by 2": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "largest of 2 by 2": lambda x: functional.max_pool2d(x, 2),
    "largest of 5 by 1": lambda x: functional.max_pool2d(x, 5, 1, 2),
    "largest of 2 by 3": lambda x: functional.max_pool2d(x, 2, 3),
    "largest of 3, apart": lambda x: functional.max_pool2d(x, 3, 2, 1, 1) + x.amax(),
    "mean of 3 by 2": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "mean of what is there": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "halves turned": halves_turned,
    "joined": lambda x: torch.cat([x, x.exp(), x * 2], -1),
    "joined rows": lambda x: torch.cat([x, x.exp()], -2),
    "padded": lambda x: functional.pad(x, (2, 3, 1, 0), value=1.5) * 2,
    "cut and padded": lambda x: functional.pad(x, (-1, 4)) * 2,
    "mirrored": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect") * 2,
    "rolled": lambda x: torch.roll(x, 1, -1) * x,
    "shifted by one": lambda x: x[..., 1:] - x[..., :-1],
}


def graphs() -> int:
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def run(call: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor | None]:
    leaf = x.detach().requires_grad_(x.is_floating_point())
    output = call(leaf)
    if output.requires_grad:
        output.backward(cotangent_of(output, 1))
    return output.detach(), leaf.grad


def require_right(ours: Callable[..., Any], program: Callable[..., Any], x: Tensor) -> None:
    """Result and gradient are eager's."""
    truth, exact = run(program, widened(x))
    expected, theirs = run(program, x.clone())
    output, mine = run(ours, x.clone())
    assert output.stride() == expected.stride()
    compare_values(output, expected, truth, f"output at {tuple(x.shape)}")
    if theirs is not None:
        compare_gradient(mine, theirs, exact, f"gradient at {tuple(x.shape)}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_every_size(name: str) -> None:
    torch.manual_seed(0)
    program = PROGRAMS[name]
    ours = compiled(program, fullgraph=True, dynamic=True)

    for n, m in SIZES:
        require_right(ours, program, torch.randn(2, 12, n, m))

    assert graphs() <= (6 if IS_OLD else 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("name", ["largest of 3 by 2", "halves turned", "padded", "joined rows"])
def test_all_types(name: str, dtype: torch.dtype) -> None:
    program = PROGRAMS[name]
    ours = compiled(program, fullgraph=True, dynamic=True)

    for n, m in SIZES[:4]:
        require_right(ours, program, torch.randint(-9, 9, (2, 12, n, m)).to(dtype))


@pytest.mark.parametrize("name", ["largest of 3 by 2", "halves turned", "padded", "joined"])
def test_sizes_of_nothing_and_of_one(name: str) -> None:
    program = PROGRAMS[name]
    ours = compiled(program, fullgraph=True, dynamic=True)

    for batch, n, m in ((3, 5, 6), (0, 5, 6), (1, 5, 6), (3, 1, 6), (3, 5, 1), (1, 1, 1)):
        if m > 1 or name != "halves turned":
            require_right(ours, program, torch.randn(batch, 2, n, m))


# Numbers

NUMBERS: Final[dict[str, Callable[[Tensor, float], Tensor]]] = {
    "divided": lambda x, scale: torch.round(x / scale).clamp(-8, 7) * scale,
    "added to": lambda x, scale: torch.add(x, x.exp(), alpha=scale) + scale,
    "compared with": lambda x, scale: torch.where(x > scale, x, -x),
    "computed with": lambda x, scale: x * (scale * 2 - 1) + (1 / scale),
    "a root of a size": lambda x, scale: (x * x.size(-1) ** -0.5).softmax(-1),
    "a share of a size": lambda x, scale: x.sum(-1) * (1.0 / x.size(-1)) + scale / 3,
    "bounded by": lambda x, scale: x.clamp(-scale, scale),
    "raised to": lambda x, scale: x.abs() ** scale,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_no_part_of_the_code(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.int32 and name in ("added to", "a root of a size"):
        pytest.skip("eager does not take it")
    torch.manual_seed(1)
    program = NUMBERS[name]
    ours = compiled(program, fullgraph=True, dynamic=True)

    for number, scale in enumerate((0.5, 0.03125, 3.0, 0.1)):
        x = torch.randn(7, 10 + number).mul(4).to(dtype)
        expected, truth = program(x, scale), program(widened(x), scale)
        compare_values(ours(x, scale), expected, truth, f"{name} by {scale}")

    assert graphs() == (2 if IS_OLD and name == "raised to" else 1)


@pytest.mark.parametrize("name", ["divided", "compared with", "computed with", "bounded by"])
def test_numbers_leave_nothing_to_torch(name: str) -> None:
    compiled(NUMBERS[name], fullgraph=True, dynamic=True)(torch.randn(7, 10), 0.25)

    assert not torch_calls()


def test_a_number_that_is_returned_is_python_s() -> None:
    def program(x: Tensor, scale: float) -> tuple[Tensor, float]:
        return x * scale, scale * 2

    ours = compiled(program, dynamic=True)

    for scale in (0.5, 0.7):
        result, number = ours(torch.ones(3), scale)
        assert number == scale * 2
        assert torch.equal(result, torch.ones(3) * scale)


def test_division_by_nothing_raises_what_python_does() -> None:
    def program(x: Tensor, scale: float) -> Tensor:
        return x * (1 / scale)

    ours = compiled(program, dynamic=True)
    assert torch.equal(ours(torch.ones(3), 0.5), torch.ones(3) * 2)

    with pytest.raises(ZeroDivisionError):
        ours(torch.ones(3), 0.0)


def test_a_root_of_a_number_of_the_program_s() -> None:
    def program(x: Tensor, width: int) -> Tensor:
        return x * width**-0.5 + math.sqrt(width)

    ours = compiled(program, dynamic=True)

    for width in (64, 5, 10**6):
        x = torch.randn(4, 9)
        expected, truth = program(x, width), program(widened(x), width)
        compare_values(ours(x, width), expected, truth, f"width {width}")


def test_an_element_that_is_overwritten_later_keeps_its_value() -> None:
    def program(x: Tensor, scale: Tensor) -> Tensor:
        number = scale.item()
        scale.mul_(3)
        return x * number + scale

    ours = compiled(program, dynamic=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        scale, expected_scale = torch.tensor(0.5), torch.tensor(0.5)
        x = torch.randn(5)
        assert torch.equal(ours(x, scale), program(x, expected_scale))
        assert torch.equal(scale, expected_scale)
