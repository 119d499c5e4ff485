"""The order in which a graph's values are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lower.graphs import lowered

SQUARE = torch.randn(4, 4)


def test_a_copy_for_the_caller_is_made_where_the_library_made_its_source() -> None:
    """So that the source dies before what follows, and not at the end of the graph."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.mm(x, x).clone()
        return gradient, torch.mm(x, x.t())

    names = [item.name for item in lowered(program, SQUARE).items]

    assert names.index("clone") < names.index("mm_1")


def test_a_copy_that_others_read_joins_them() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = torch.mm(x, x).clone()
        return torch.mm(x, x.t()), copy * 2

    assert "clone" not in [item.name for item in lowered(program, SQUARE).items]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [lambda x: x.amax(-1), lambda x: x.max()], ids=["row", "all"])
def test_halves_are_compared_as_memory_holds_them(
    largest: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The backward computes the product again, and looks for the largest that the forward kept."""
    x, w = torch.randn(64, 300).to(dtype).requires_grad_(), torch.randn(300).to(dtype)
    twin = x.detach().clone().requires_grad_()

    compiled = torch.compile(lambda x, w: largest(x * w), backend="stator")
    compiled(x, w).sum().backward()

    largest(twin * w).sum().backward()
    assert torch.equal(x.grad, twin.grad)
