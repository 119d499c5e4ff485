"""Windows, joins and borders of unknown sizes: kernels are right at every size, empty ones too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.schedule.programs import Program, require_same, scheduled

Call = Callable[[Tensor], Any]

TYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8)


def image(n: int, m: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-9, 9, (2, n, m)).to(dtype)


def table(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-9, 9, (18, n)).to(dtype)


def halves_turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1) * 2 + x


def kernels(program: Program) -> int:
    return len(program.kernels)


# Windows: the least size, then the arguments

POOLS: Final[dict[str, tuple[int, Call]]] = {
    "3 by 2, padded": (1, partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)),
    "2 by 2": (2, partial(functional.max_pool2d, kernel_size=2)),
    "3 by 3, padded": (1, partial(functional.max_pool2d, kernel_size=3, padding=1)),
    "5 by 1, padded": (1, partial(functional.max_pool2d, kernel_size=5, stride=1, padding=2)),
    "2 by 3": (2, partial(functional.max_pool2d, kernel_size=2, stride=3)),
    "apart": (3, partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1, dilation=2)),
    "mean": (1, partial(functional.avg_pool2d, kernel_size=3, stride=2, padding=1)),
    "mean of what is there": (
        1,
        partial(functional.avg_pool2d, kernel_size=3, padding=1, count_include_pad=False),
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_windows(name: str) -> None:
    least, pool = POOLS[name]
    others = [(image(n, m),) for n in range(least, 7) for m in (least, 5, 8, 17)]

    require_same(pool, image(9, 12), symbolic=True, others=tuple(others))


@pytest.mark.parametrize("dtype", TYPES)
def test_windows_of_all_types(dtype: torch.dtype) -> None:
    _, pool = POOLS["3 by 2, padded"]
    others = [(image(n, n + 1, dtype),) for n in (1, 2, 3, 8)]

    require_same(pool, image(9, 12, dtype), symbolic=True, others=tuple(others))


# Joins and borders

ROWS: Final[dict[str, tuple[int, Call]]] = {
    "joined": (0, lambda x: torch.cat([x, x.neg()], 1)),
    "joined of three": (0, lambda x: torch.cat([x, x.neg(), x + 1], 1)),
    "joined with a known one": (0, lambda x: torch.cat([x, x.new_ones(18, 3), x], 1)),
    "halves turned": (2, halves_turned),
    "a part that may be empty": (2, lambda x: torch.cat([x[:, 2:], x[:, :2]], 1) + 1),
    "padded": (0, lambda x: functional.pad(x, (2, 3))),
    "padded wider than it is": (1, lambda x: functional.pad(x, (20, 1), value=3)),
    "cut": (4, lambda x: functional.pad(x, (-1, -2)) + 1),
    "cut and padded": (2, lambda x: functional.pad(x, (-2, 4)) + 1),
    "padded and cut": (2, lambda x: functional.pad(x, (4, -2)) + 1),
    "padded twice": (0, lambda x: functional.pad(functional.pad(x, (1, 2)), (3, 1), value=2)),
    "padded by its own size": (1, lambda x: functional.pad(x, (x.size(1), 0))),
    "joined and padded": (0, lambda x: functional.pad(torch.cat([x, x], 1), (2, 2))),
    "padded rows": (0, lambda x: functional.pad(x, (0, 0, 1, 2))),
    "mirrored": (3, lambda x: functional.pad(x, (2, 1), mode="reflect")),
    "repeated": (1, lambda x: functional.pad(x, (2, 3), mode="replicate")),
    "rolled": (4, lambda x: torch.roll(x, 3, 1)),
    "flipped and joined": (0, lambda x: torch.cat([x.flip(1), x], 1)),
    "every second, joined": (1, lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1)),
    "stacked": (0, lambda x: torch.stack([x, x + 1], 2)),
    "of many": (0, lambda x: torch.cat([x + d for d in range(6)], 1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_joins_and_borders(name: str) -> None:
    least, program = ROWS[name]
    others = [(table(n),) for n in range(least, 9)]

    require_same(program, table(12), symbolic=True, others=tuple(others))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["halves turned", "cut and padded", "joined of three"])
def test_joins_of_all_types(name: str, dtype: torch.dtype) -> None:
    least, program = ROWS[name]
    others = [(table(n, dtype),) for n in (least, 5)]

    require_same(program, table(12, dtype), symbolic=True, others=tuple(others))


@pytest.mark.parametrize("name", ["halves turned", "padded", "joined of three"])
def test_one_kernel_does_it(name: str) -> None:
    program = scheduled(ROWS[name][1], table(12), symbolic=True)

    assert kernels(program) == 1
    assert len(program.only.stages) > 1


def both(first: Iterable[int], second: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
    return [(table(n), table(m)) for n in first for m in second]


def test_two_sizes_of_which_nothing_is_known() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return functional.pad(torch.cat([x, y], 1), (2, 1)) + 1

    require_same(
        program, table(12), table(5), symbolic=True, others=tuple(both((0, 1, 4), (0, 2, 9)))
    )
