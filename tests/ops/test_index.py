"""Gathers against eager: indices of every kind, out of range as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.fused import TYPES, check_fused, sample
from tests.parity import check, compiled

ROWS = torch.tensor([1, 0, 3, -1, 1])
COLUMNS = torch.tensor([[2], [0], [-3]])

INDICES: dict[str, Callable[[Tensor], Any]] = {
    "first": lambda x: x[ROWS],
    "middle": lambda x: x[:, ROWS],
    "last": lambda x: x[..., ROWS],
    "two": lambda x: x[ROWS[:3], :, COLUMNS],
    "adjacent": lambda x: x[:, ROWS, COLUMNS],
    "apart": lambda x: x[ROWS, :, ROWS],
    "all": lambda x: x[COLUMNS, ROWS, ROWS],
    "with a number": lambda x: (x[1, ROWS], x[ROWS, 2]),
    "with a slice": lambda x: x[1:, ROWS[:3]][:, :, ::2],
    "of 32 bits": lambda x: x[ROWS.int()],
    "a number": lambda x: x[torch.tensor(2)],
    "list": lambda x: (x[[0, 2]], x[:, [1, 1, 1]]),
    "known": lambda x: (x[torch.arange(3)], x[:, torch.arange(4) - 4]),
    "diagonal": lambda x: x[torch.arange(4), torch.arange(4)],
    "of computed": lambda x: (x * 2).exp()[ROWS].relu(),
    "of few": lambda x: (x[:1] * 2).exp()[torch.zeros(9, dtype=torch.int64)],
    "of expanded": lambda x: x[:, :1].expand(4, 6, 4)[:, ROWS],
}


@pytest.mark.parametrize("name", INDICES)
def test_index(name: str) -> None:
    """x[...] by tensors."""
    check_fused(INDICES[name], sample(4, 4, 4))


def test_index_of_odd_inputs() -> None:
    """Inputs that are transposed or strided; index tensors that are, too."""

    def read(x: Tensor, y: Tensor, i: Tensor) -> Any:
        return x[i], y[i.t()[:, 0]], y[i[0]]

    rows = torch.tensor([[1, 0], [3, 2], [2, 2]]).t()
    # How eager lays the first result, fake tensors do not foretell.
    odd = (sample(3, 4, grad=False).t(), sample(8, grad=False)[::2], rows)
    check_fused(read, *odd, stays=("index",))


def test_mask_stays() -> None:
    """How many elements a mask selects, only eager knows."""
    check(lambda x: x[x > 0] * 2, sample(4, 4), grad=False)


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Every type, through every gather."""

    def read(x: Tensor, i: Tensor) -> Any:
        return (
            x[i[0]],
            x.gather(1, i),
            x.index_select(0, i[1]),
            x.take(i),
            x.take_along_dim(i, 1),
            F.embedding(i, x),
        )

    check_fused(read, sample(4, 3, dtype=dtype), torch.tensor([[0, 2, 1], [2, 2, 0]]))


def test_gather() -> None:
    """Indices smaller than the tensor, with repetitions, along every dimension."""

    def read(x: Tensor, i: Tensor, one: Tensor) -> Any:
        return (
            x.gather(0, i),
            x.gather(-1, i),
            x.t().gather(1, i),
            one.gather(0, torch.tensor(0)),
            x[0].gather(0, torch.tensor(2)),
            x.exp().gather(1, i),
        )

    check_fused(read, sample(4, 3), torch.tensor([[0, 2, 1], [2, 2, 0]]), sample())


def test_index_select() -> None:
    """Along every dimension; of a number alone; by a number alone."""

    def read(x: Tensor, i: Tensor, one: Tensor) -> Any:
        return (
            x.index_select(0, i),
            x.index_select(-1, i.int()),
            x.index_select(1, i[0]),
            one.index_select(0, torch.tensor([0])),
        )

    check_fused(read, sample(4, 3, 5), torch.tensor([2, 0, 2, 1, 0, 0]), sample())


def test_embedding() -> None:
    """Rows of a table; the padding gets no gradient."""

    def read(w: Tensor, i: Tensor) -> Any:
        return F.embedding(i, w), F.embedding(i.int(), w, padding_idx=2), F.embedding(i[0, 0], w)

    check_fused(read, sample(5, 3), torch.tensor([[4, 2, 2], [0, 2, 4]]))
    check_fused(
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        sample(5, 3),
        torch.tensor([4, 2, 2]),
        stays=("embedding_dense_backward",),
    )


def test_take() -> None:
    """Elements by their number, from both ends."""

    def read(x: Tensor, i: Tensor, one: Tensor) -> Any:
        return x.take(i), x.t().take(i), one.take(torch.tensor([0, -1]))

    check_fused(read, sample(4, 3), torch.tensor([[0, 11], [-12, -1]]), sample())


OUTSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, ...]]] = {
    "index": (lambda x, i: x[i], (4, -5)),
    "index of a later dimension": (lambda x, i: x[:, i], (3, -4)),
    "gather": (lambda x, i: x.gather(0, i.view(1, 1)), (4, -1)),
    "index_select": (lambda x, i: x.index_select(0, i), (4, -1)),
    "index_select of columns": (lambda x, i: x.index_select(1, i), (3, -1)),
    "embedding": (lambda x, i: F.embedding(i, x), (4, -1)),
    "take": (lambda x, i: x.take(i), (12, -13)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_out_of_range(name: str) -> None:
    """What eager raises, of the same type and wording; and nothing once the index is right."""
    function, places = OUTSIDE[name]
    for place in places:
        check(function, sample(4, 3), torch.tensor([place]))
    run = compiled(function)
    x = sample(4, 3)
    run(x, torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError), match=r"out of|range"):
        run(x, torch.tensor([places[0]]))
    assert torch.equal(run(x, torch.tensor([2])), function(x, torch.tensor([2])))


def test_upsampling() -> None:
    """Nearest and linear upsampling come as gathers."""

    def read(x: Tensor) -> Any:
        return [
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(5, 11)),
            F.interpolate(x, size=(3, 2), mode="nearest-exact"),
            F.interpolate(x, scale_factor=1.7, mode="bilinear"),
            F.interpolate(x, size=(7, 5), mode="bilinear", align_corners=True),
        ]

    check_fused(read, sample(2, 3, 4, 6))


def test_upsampling_of_other_ranks() -> None:
    """One dimension, three, and the cubic one."""
    line, cube = sample(2, 3, 7), sample(1, 2, 3, 4, 2)
    check_fused(lambda x: F.interpolate(x, scale_factor=2) * 2, line)
    check_fused(lambda x: F.interpolate(x, size=5, mode="linear"), line)
    check_fused(lambda x: F.interpolate(x, scale_factor=2), cube)
    check_fused(lambda x: F.interpolate(x, size=(4, 5, 3), mode="trilinear"), cube)
    check_fused(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), sample(1, 2, 4, 3))


def test_dynamic_sizes() -> None:
    """Sizes that are known when it runs."""

    def read(x: Tensor, i: Tensor) -> Any:
        return x[i], x.gather(0, i[:, None].expand(-1, 2)), F.embedding(i, x), x.index_select(0, i)

    check_fused(read, sample(5, 6, grad=False), torch.tensor([1, 4, 0]), dynamic=True)
