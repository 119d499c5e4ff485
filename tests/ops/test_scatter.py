"""Scatters against eager: every operator, duplicate and wrong indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.lower.items import Check, Compute, Extern, Scatter
from tests.lower.graphs import lowered
from tests.ops.fused import FLOATS, TYPES, check_fused, sample
from tests.parity import check

UNIQUE = torch.tensor([[0, 2, 1], [3, 0, 2]])  # along dimension 0
TWICE = torch.tensor([[0, 2, 1], [0, 2, 3]])
ROWS = torch.tensor([3, 0, 2])
SAME_ROWS = torch.tensor([1, 1, 3])

SCATTERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scatter": lambda x, y: (
        x.scatter(0, UNIQUE, y[:2]),
        x.scatter(-1, UNIQUE[:, :1] % 3, y[:2, :1]),
    ),
    "scatter a number": lambda x, y: (x.scatter(0, TWICE, 2.5), x.scatter(0, UNIQUE, 0)),
    "scatter_add": lambda x, y: (
        x.scatter_add(0, TWICE, y[:2]),
        x.scatter_add(1, TWICE % 3, y[1:3]),
    ),
    "index_add": lambda x, y: (
        x.index_add(0, SAME_ROWS, y[:3], alpha=0.5),
        x.index_add(1, torch.tensor([1, 0]), y[:, :2]),
    ),
    "index_copy": lambda x, y: (
        x.index_copy(0, ROWS, y[:3]),
        x.index_copy(-1, ROWS[:1] - 1, y[:, :1]),
    ),
    "index_fill": lambda x, y: (x.index_fill(0, ROWS, 2.0), x.index_fill(1, ROWS - 3, 0)),
    "index_fill by a tensor": lambda x, y: x.trace() * 2,  # in its backward
    "index_put": lambda x, y: (x.index_put((ROWS,), y[:3]), x.index_put((ROWS, ROWS - 3), y[0])),
    "index_put broadcast": lambda x, y: x.index_put((ROWS,), y[0, 0]),
    "index_put adds": lambda x, y: (
        x.index_put((SAME_ROWS,), y[:3], accumulate=True),
        x.index_put((SAME_ROWS, ROWS - 3), y[0], accumulate=True),
    ),
    "put": lambda x, y: (
        x.put(torch.tensor([[0, -1], [3, 5]]), y[:2, :2]),
        x.put(torch.tensor([1, 1, -2]), y[0], accumulate=True),
    ),
    "put of another shape": lambda x, y: x.put(torch.tensor([0, -1, 3, 5]), y[:2, :2]),
    "of computed": lambda x, y: (x * 2).scatter_add(0, TWICE, y[:2].exp()).relu(),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str) -> None:
    """Values to their places, and gradients back."""
    check_fused(SCATTERS[name], sample(4, 3), sample(4, 3))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin", "mean"])
def test_reduce(reduce: str, include_self: bool) -> None:
    """Every way to combine; what was there counts, or does not."""

    def run(x: Tensor, y: Tensor) -> Any:
        return (
            x.scatter_reduce(0, TWICE, y[:2], reduce, include_self=include_self),
            x.scatter_reduce(1, TWICE[:, :2] % 3, y[:2, :2], reduce, include_self=include_self),
        )

    check_fused(run, sample(4, 3), sample(4, 3))
    whole = sample(4, 3, dtype=torch.int64), sample(4, 3, dtype=torch.int64)
    check_fused(run, *whole)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "amax", "amin", "mean"])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_reduce(reduce: str, include_self: bool) -> None:
    """The same by rows."""

    def run(x: Tensor, y: Tensor) -> Any:
        return x.index_reduce(0, SAME_ROWS, y[:3], reduce, include_self=include_self)

    check_fused(run, sample(4, 3), sample(4, 3))


def test_reduce_with_nan() -> None:
    """NaN wins."""

    def run(x: Tensor, y: Tensor) -> Any:
        return [x.scatter_reduce(0, TWICE, y, how) for how in ("amax", "amin", "sum", "prod")]

    x, y = sample(4, 3, grad=False), sample(4, 3, grad=False)
    x[2, 1] = y[0, 0] = float("nan")
    y[1, 2] = float("inf")
    check_fused(run, x, y)


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: torch.dtype) -> None:
    """Every type, through every scatter."""

    def run(x: Tensor, y: Tensor) -> Any:
        return (
            x.scatter(0, UNIQUE, y[:2]),
            x.scatter(0, TWICE, 1),
            x.scatter_add(0, TWICE, y[:2]),
            x.index_add(0, SAME_ROWS, y[:3]),
            x.index_copy(0, ROWS, y[:3]),
            x.index_fill(0, ROWS, 1),
            x.index_put((ROWS,), y[:3]),
            x.index_put((SAME_ROWS,), y[:3], accumulate=True),
            x.put(ROWS, y[0]),
        )

    check_fused(run, sample(4, 3, dtype=dtype), sample(4, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_onto_one(dtype: torch.dtype) -> None:
    """A long sum in one place is as exact as eager's."""

    def run(x: Tensor, y: Tensor) -> Any:
        return x.scatter_add(0, torch.zeros(1000, dtype=torch.int64), y), x.index_add(
            0, torch.ones(1000, dtype=torch.int64), y
        )

    values = torch.randn(1000).to(dtype)
    check_fused(run, torch.zeros(2, dtype=dtype), values)


def test_odd_inputs() -> None:
    """Tensors that are transposed, expanded or numbers alone."""

    def run(x: Tensor, y: Tensor, one: Tensor) -> Any:
        return (
            x.scatter_add(0, TWICE, y),
            x.index_put((ROWS,), y[0]),
            one.scatter(0, torch.tensor([0]), y[0, :1]),
            one.index_add(0, torch.tensor([0]), y[0, 0]),
            one.index_fill(0, torch.tensor([0]), 3.0),
            y[0].scatter_add(0, torch.tensor(1), one),
            one.index_copy(0, torch.tensor([0]), one * 2),
        )

    check_fused(run, sample(3, 4, grad=False).t(), sample(1, 3, grad=False).expand(4, 3), sample())


def test_smaller_indices() -> None:
    """An index that covers a part of the source, and of the tensor."""

    def run(x: Tensor, y: Tensor) -> Any:
        return x.scatter(0, TWICE[:, :2], y), x.scatter_add(1, TWICE[:1, :1], y)

    check_fused(run, sample(4, 3, grad=False), sample(4, 3, grad=False))


def test_assignment() -> None:
    """What assignments through tensors become; a mask takes one number."""

    def run(x: Tensor, y: Tensor) -> Any:
        z = x.clone()
        z[ROWS] = 1.0
        z[:, SAME_ROWS[:1]] = y[:, :1]
        z[ROWS, ROWS - 3] += y[0]
        z[z > 1] = 0
        z[:, z[0] < 0] = 2.0
        return z

    check_fused(run, sample(4, 3), sample(4, 3))


OUTSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, ...]]] = {
    "scatter": (lambda x, i: x.scatter(0, i.view(1, 1), x), (4, -1)),
    "scatter a number": (lambda x, i: x.scatter(1, i.view(1, 1), 1.0), (3, -1)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i.view(1, 1), x), (4, -1)),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i.view(1, 1), x, "amax"), (4, -1)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:1]), (4, -1)),
    "index_add of a vector": (lambda x, i: x[0].index_add(0, i, x[0, :1]), (3, -1)),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:1]), (4, -1)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (4, -5)),
    "index_put": (lambda x, i: x.index_put((i,), x[0]), (4, -5)),
    "put": (lambda x, i: x.put(i, x[0, :1]), (12, -13)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_out_of_range(name: str) -> None:
    """What eager raises."""
    function, places = OUTSIDE[name]
    for place in places:
        check(function, sample(4, 3, grad=False), torch.tensor([place]))


def test_no_copy_behind_a_scatter() -> None:
    """What was scattered into is the result; a copy of it is another tensor."""

    def run(x: Tensor, y: Tensor) -> Any:
        added = x.index_add(0, ROWS, y)
        return added, added.clone(), added.view(-1)

    x, y = torch.ones(4, 3), torch.ones(3, 3)
    found = lowered(lambda x, i, y: x.index_add(0, i, y), x, ROWS, y)
    kinds = [type(item) for item in found.items if not isinstance(item, Extern | Check)]
    assert kinds == [Compute, Compute, Scatter]  # the check, the start, the updates
    check_fused(run, sample(4, 3), sample(3, 3))


def test_dynamic_sizes() -> None:
    """Sizes that are known when it runs."""

    def run(x: Tensor, y: Tensor, i: Tensor) -> Any:
        return (
            x.index_add(0, i, y),
            x.index_put((i,), y, accumulate=True),
            x.scatter_add(0, i[:, None].expand(-1, 6), y),
        )

    check_fused(run, sample(5, 6), sample(3, 6), torch.tensor([1, 4, 1]), dynamic=True)


# --- one number a row, into one number everywhere ---

LABELS = torch.tensor([[2], [0], [1], [2]])

CHOSEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "times a tensor": lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0) * x,
    "smoothed": lambda x, i: (torch.full_like(x, 0.1).scatter(-1, i, 0.9) * x).sum(),
    "along the rows": lambda x, i: torch.zeros(3, 4).scatter(0, i.t(), -2.5) @ x,
    "of integers": lambda x, i: torch.zeros(4, 3, dtype=torch.int64).scatter(1, i, 7) + i,
    "of truth values": lambda x, i: torch.ones(4, 3, dtype=torch.bool).scatter(1, i, 0) | (x > 0),
    "not a number": lambda x, i: torch.full_like(x, float("nan")).scatter(1, i, float("inf")),
    "returned": lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0),
}
SCATTERED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "into other numbers": lambda x, i: x.scatter(1, i, 1.0) * 2,
    "into some rows": lambda x, i: torch.zeros_like(x).scatter(1, i[:2], 1.0) * 2,
    "two a row": lambda x, i: torch.zeros_like(x).scatter(1, i.expand(-1, 2), 1.0) * 2,
    "half a type": lambda x, i: torch.zeros(4, 3).half().scatter(1, i, 0.1) * 2,  # rounds 0.1
}


def scatters_in(program: Callable[[Tensor, Tensor], Any]) -> int:
    items = lowered(program, sample(4, 3, grad=False), LABELS).items
    return sum(isinstance(item, Scatter) for item in items)


@pytest.mark.parametrize("name", CHOSEN)
def test_one_number_a_row_is_a_comparison(name: str) -> None:
    assert scatters_in(CHOSEN[name]) == 0
    check(CHOSEN[name], sample(4, 3), LABELS)
    check(CHOSEN[name], sample(4, 3), LABELS, dynamic=True)


@pytest.mark.parametrize("name", SCATTERED)
def test_all_else_is_scattered(name: str) -> None:
    assert scatters_in(SCATTERED[name]) == 1
    check(SCATTERED[name], sample(4, 3), LABELS)


@pytest.mark.parametrize("place", [3, -1])
def test_a_comparison_is_checked_too(place: int) -> None:
    check(CHOSEN["times a tensor"], sample(4, 3, grad=False), torch.full((4, 1), place))
