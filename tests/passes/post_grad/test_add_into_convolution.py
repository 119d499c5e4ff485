"""Convolutions add to a tensor where it lies, if nobody else has it: whole programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stator.ops.libraries import onednn_convolution
from tests.passes.freezing.accuracy import is_as_exact
from tests.passes.freezing.ways import expected_ways

pytestmark = pytest.mark.skipif(onednn_convolution() is None, reason="torch has no oneDNN here")

Program = Callable[..., Any]


class Block(nn.Module):
    """Two convolutions, whose result is joined with something by `join`."""

    def __init__(self, join: Program) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 1)
        self.third = nn.Conv2d(8, 8, 1)
        self.join = join

    def forward(self, x: Tensor) -> Any:
        """As the join says."""
        return self.join(self, x)


def residual(block: Block, x: Tensor) -> Any:
    y = block.first(x).relu()
    return (block.third(block.second(y)) + y).relu()


def two_in_a_row(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    z = block.second(y.exp()) + y
    return block.third(z.exp()) + z


def to_the_image(block: Block, x: Tensor) -> Any:
    y = block.second(x)
    return block.first(y) + y


def two_convolutions(block: Block, x: Tensor) -> Any:
    return block.third(block.first(x) + block.second(x))  # three: images lie channels last


def scaled(block: Block, x: Tensor) -> Any:
    return torch.add(block.second(block.first(x)), block.first(x), alpha=2)


def read_later(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    return (block.second(y) + y) * y.exp()


def returned(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    return block.second(y) + y, y


def part_returned(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    return block.second(y) + y, y[:, 2:]


def part_read_later(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    part = y[:, 2:]
    return block.third(block.second(y) + y)[:, 2:] * part


def to_the_input(block: Block, x: Tensor) -> Any:
    return block.first(x) + x


def to_itself(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    return y + y


def spread(block: Block, x: Tensor) -> Any:
    y = block.first(x)
    return block.second(y) + y.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize(
    ("join", "onto"),
    [
        (residual, 1),
        (two_in_a_row, 2),
        (two_convolutions, 1),
        (scaled, 0),
        (read_later, 0),
        (returned, 0),
        (part_returned, 0),
        (part_read_later, 0),
        (to_the_input, 0),
        (to_itself, 0),
        (to_the_image, 0),
        (spread, 0),
    ],
)
def test_they_add_where_nobody_else_reads(
    join: Program, onto: int, executor: str, layout: torch.memory_format, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    block = Block(join).eval()
    x = torch.randn(2, 8, 10, 10).contiguous(memory_format=layout)
    x[0, 0, 0, 0] = float("nan")
    options = {"freezing": executor == "native", "executor": executor, "dump_dir": str(tmp_path)}
    with torch.no_grad(), expected_ways():
        expected = block(x)
        before = x.clone()
        compiled = torch.compile(block, backend="stator", options=options)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x, before, equal_nan=True, rtol=0, atol=0)

    (plan,) = tmp_path.rglob("forward_plan.txt")
    if executor == "native":  # the other one packs nothing
        assert plan.read_text().count("_convolution_pointwise_.binary") == onto


@pytest.mark.parametrize("join", [residual, two_in_a_row, two_convolutions])
def test_sums_inside_are_as_exact_as_those_of_kernels(join: Program) -> None:
    torch.manual_seed(0)
    block, x = Block(join).eval(), torch.randn(2, 8, 10, 10)
    compiled = torch.compile(block, backend="stator", options={"freezing": True})
    with torch.no_grad(), expected_ways():
        found, plain = compiled(x), block(x)
        assert is_as_exact(found, plain, block.double()(x.double()))


def test_kernels_are_verified_around_them() -> None:
    torch.manual_seed(0)
    block, x = Block(residual).eval(), torch.randn(2, 8, 10, 10)
    with torch.no_grad(), expected_ways():
        options = {"freezing": True, "verify": "kernels"}
        compiled = torch.compile(block, backend="stator", options=options)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-5)
