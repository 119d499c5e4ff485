"""More elements than 32 bits count: no index wraps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from tests.parity import compiled

LENGTH: Final = 2**31 + 2**16 + 3
MARKED: Final = {0: 3, 2**31 - 1: 5, 2**31: 7, 2**31 + 1: 11, LENGTH - 1: 13}
NEEDED: Final = 8 << 30  # bytes; half of it is touched


def free_bytes() -> int:
    """Memory that is available; none where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return 1024 * kilobytes.get("MemAvailable", 0)


def pointwise(x: Tensor) -> Tensor:
    return x * 2 + 1


def reduced(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(), x.amax(), (x > 4).sum()


def chosen(x: Tensor, places: Tensor) -> Tensor:
    return x[places] * 2


def by_rows(x: Tensor) -> Tensor:
    """Sums over rows of 2**31 // 8 elements and more, the last of which begin far behind."""
    return x[: LENGTH // 8 * 8].view(8, -1).sum(1)


@pytest.mark.skipif("STATOR_LARGE" not in os.environ, reason="STATOR_LARGE=1 runs it: 4.5 GB")
@pytest.mark.skipif(free_bytes() < NEEDED, reason="needs 8 GB of free memory")
def test_elements_behind_the_second_billion_are_reached() -> None:
    """One test, so that the memory is there once."""
    x = torch.zeros(LENGTH, dtype=torch.int8)  # pages that nobody touches cost nothing
    for place, value in MARKED.items():
        x[place] = value

    total, most, count = compiled(reduced, dynamic=False)(x)
    assert (total.item(), most.item(), count.item()) == (39, 13, 4)

    (total, most, count) = compiled(reduced, dynamic=True)(x)
    assert (total.item(), most.item(), count.item()) == (39, 13, 4)

    places = torch.tensor(list(MARKED))
    expected = [2 * value for value in MARKED.values()]
    assert compiled(chosen, dynamic=False)(x, places).tolist() == expected
    assert compiled(by_rows, dynamic=False)(x).tolist() == [3, 0, 0, 0, 0, 0, 0, 23]

    result = compiled(pointwise, dynamic=False)(x)
    assert [result[place].item() for place in MARKED] == [2 * v + 1 for v in MARKED.values()]
    assert result[5].item() == result[2**31 + 5].item() == 1
    # Not by torch, which would widen the whole tensor first.
    assert compiled(reduced, dynamic=False)(result)[0].item() == LENGTH + 2 * 39
