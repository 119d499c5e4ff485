"""Sums, products, means, extremes, any and all, against eager and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.ops.fused import FLOATS, INTEGERS, TYPES, check_fused
from tests.ops.layouts import DIMS, LAYOUTS, odd_values, plain

# Each takes a tensor, dimensions and keepdim.
OVER: Final[dict[str, Callable[[Tensor, list[int], bool], Any]]] = {
    "sum": lambda x, d, k: x.sum(d, k),
    "mean": lambda x, d, k: x.mean(d, k),
    "nansum": lambda x, d, k: x.nansum(d, k),
    "nanmean": lambda x, d, k: x.nanmean(d, k),
    "amax": lambda x, d, k: x.amax(d, k),
    "amin": lambda x, d, k: x.amin(d, k),
    "any": lambda x, d, k: x.any(d, k),
    "all": lambda x, d, k: x.all(d, k),
    "logsumexp": lambda x, d, k: x.logsumexp(d, k),
    "count_nonzero": lambda x, d, k: x.count_nonzero(d),
}
# Along one dimension.
ALONG: Final[dict[str, Callable[[Tensor, int, bool], Any]]] = {
    "prod": lambda x, d, k: x.prod(d, k),
    "aminmax": lambda x, d, k: tuple(torch.aminmax(x, dim=d, keepdim=k)),
    "any of one": lambda x, d, k: x.any(d, k),
    "all of one": lambda x, d, k: x.all(d, k),
}
ALL: Final[dict[str, Callable[[Tensor], Any]]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "nansum": lambda x: x.nansum(),
    "prod": lambda x: x.prod(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "aminmax": lambda x: tuple(torch.aminmax(x)),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "count_nonzero": lambda x: x.count_nonzero(),
}
OF_INTEGERS: Final = ("sum", "nansum", "amax", "amin", "any", "all", "count_nonzero")


@pytest.mark.parametrize("name", OVER)
def test_over_dimensions(name: str) -> None:
    """Every set of dimensions, kept and gone."""

    def reduce(x: Tensor) -> list[Any]:
        kept = [OVER[name](x, dims, True) for dims in DIMS[3:]]
        return [OVER[name](x, dims, False) for dims in DIMS] + kept

    check_fused(reduce, plain(4, 5, 6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Every set of dimensions of every layout."""

    def reduce(x: Tensor) -> list[Any]:
        return [f(dims) for dims in DIMS for f in (x.sum, x.logsumexp)] + [x.amax(0), x.any(1)]

    check_fused(reduce, LAYOUTS[layout]())


@pytest.mark.parametrize("name", ALONG)
def test_along_a_dimension(name: str) -> None:
    """First, middle and last dimension, counted from both ends."""

    def reduce(x: Tensor) -> list[Any]:
        return [ALONG[name](x, dim, keep) for dim, keep in ((0, False), (1, True), (-1, False))]

    check_fused(reduce, plain(4, 5, 6).transpose(0, 1))


@pytest.mark.parametrize("name", ALL)
def test_all_elements(name: str) -> None:
    """Down to one number, from one number and from many."""
    for size in ((), (4, 5, 6), (3, 50_000)):
        check_fused(ALL[name], plain(*size))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_types(dtype: torch.dtype) -> None:
    """Halves are widened on the way."""

    def reduce(x: Tensor) -> list[Any]:
        return [OVER[name](x, [dim], False) for name in OVER for dim in (-1, 0)]

    check_fused(reduce, plain(9, 70, dtype=dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_types(dtype: torch.dtype) -> None:
    """Sums of integers and bools are int64; uint8 keeps its type in any and all."""

    def reduce(x: Tensor) -> list[Any]:
        return [OVER[name](x, [dim], False) for name in OF_INTEGERS for dim in (-1, 0)]

    check_fused(reduce, plain(9, 20, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_products_and_extremes_of_every_type(dtype: torch.dtype) -> None:
    """Along a dimension and over all."""

    def reduce(x: Tensor) -> Any:
        return x.prod(0), x.prod(), x.max(), x.min(), tuple(torch.aminmax(x, dim=1))

    check_fused(reduce, plain(6, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_values(dtype: torch.dtype) -> None:
    """NaN, infinities and zeros go through as in eager."""

    def reduce(x: Tensor) -> list[Any]:
        found = [OVER[name](x, [dim], False) for name in OVER for dim in (0, 1)]
        return [*found, x.prod(0), x.prod(1)]

    check_fused(reduce, odd_values(dtype))


def test_given_result_types() -> None:
    """Elements are converted before they are combined."""

    def reduce(x: Tensor, n: Tensor, b: Tensor) -> Any:
        return (
            x.sum(1, dtype=torch.float64),
            x.sum(dtype=torch.int64),
            n.sum(dtype=torch.uint8),
            n.sum(dtype=torch.float32),
            b.sum(dtype=torch.bool),
            b.sum(0, dtype=torch.int32),
            n.mean(dtype=torch.float32),
            x.mean(0, dtype=torch.float64),
            n.prod(dtype=torch.float64),
            b.prod(dtype=torch.bool),
            x.nansum(dtype=torch.float64),
        )

    check_fused(reduce, plain(4, 9) * 5, plain(6, dtype=torch.int32), plain(3, dtype=torch.bool))


def test_no_dimensions() -> None:
    """An empty list means all of them, but for any and all."""
    aten = torch.ops.aten

    def reduce(x: Tensor) -> Any:
        return (
            aten.sum.dim_IntList(x, []),
            aten.mean.dim(x, []),
            aten.amax(x, []),
            aten.any.dims(x, []),
            aten.all.dims(x, []),
            aten.any.dims(x, None),
            aten.count_nonzero.dim_IntList(x, []),
        )

    check_fused(reduce, plain(3, 4))


def test_one_number() -> None:
    """A tensor without dimensions."""

    def reduce(x: Tensor) -> Any:
        over = [OVER[name](x, [dim], True) for name in OVER for dim in (0, -1)]
        return over, [ALONG[name](x, 0, False) for name in ALONG]

    check_fused(reduce, plain())


def test_trace() -> None:
    """The diagonal of what is square, wide or tall."""
    for size in ((5, 5), (3, 7), (7, 3), (1, 4)):
        check_fused(lambda x: x.trace(), plain(*size))
    check_fused(lambda x: x.trace(), plain(4, 4, dtype=torch.int32))


def test_gradients() -> None:
    """Extremes share their gradient among equals; products are taken apart by scans."""

    def reduce(x: Tensor) -> Any:
        return (
            x.sum(1),
            x.mean(),
            x.amax(0),
            x.amin(1, True),
            x.max(),
            x.logsumexp([0, 1]),
            x.nansum(0),
        )

    check_fused(reduce, plain(7, 9).requires_grad_())
    check_fused(reduce, torch.ones(3, 4).requires_grad_())


def test_sums_of_what_was_computed() -> None:
    """A reduction computes what it reads."""

    def reduce(x: Tensor, y: Tensor) -> Any:
        return (x * y + 1).exp().sum(-1), (x - y).abs().amax(0), (x @ y.mT).mean(-1)

    check_fused(reduce, plain(6, 8), plain(6, 8), stays=("matmul", "mm"))


@pytest.mark.parametrize("count", [100, 1024, 5000, 1 << 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_are_as_exact_as_eagers(count: int, dtype: torch.dtype) -> None:
    """Of one sign, where errors would add up."""

    def reduce(x: Tensor) -> Any:
        return x.sum(), x.mean(), x.logsumexp(0), x.sum(0, dtype=torch.float32)

    check_fused(reduce, torch.rand(count).to(dtype))


def test_symbolic_counts() -> None:
    """A mean divides by a size that only the call knows."""

    def reduce(x: Tensor) -> Any:
        return x.mean(0), x.mean(-1, True), x.sum(), x.amax(0), x.logsumexp([1]), x.any(1)

    check_fused(reduce, plain(7, 9), dynamic=True)
