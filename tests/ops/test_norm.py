"""Softmax and layer norm, forward and backward, against eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, log_softmax, rms_norm, softmax

from tests.ops.fused import FLOATS, check_fused
from tests.ops.layouts import LAYOUTS, odd_values, plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_layouts(layout: str) -> None:
    """Along every dimension of every layout, with gradients."""

    def both(x: Tensor) -> list[Any]:
        return [f(x, dim) for f in (softmax, log_softmax) for dim in (0, 1, -1)]

    check_fused(both, LAYOUTS[layout]().requires_grad_())


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_types(dtype: torch.dtype) -> None:
    """Halves are widened; another result type may be asked for."""

    def both(x: Tensor) -> Any:
        return (
            softmax(x, -1),
            log_softmax(x, 0),
            softmax(x, -1, dtype=torch.float32),
            log_softmax(x, -1, dtype=torch.float64),
        )

    narrowest = torch.float32 if dtype is torch.float64 else None
    check_fused(both, plain(6, 50, dtype=dtype).requires_grad_(), precision=narrowest)


def test_softmax_of_odd_values() -> None:
    """Rows of -inf are NaN, as in eager."""
    check_fused(lambda x: (softmax(x, 1), log_softmax(x, 1)), odd_values())


def test_softmax_of_one_number() -> None:
    """A tensor without dimensions."""
    check_fused(lambda x: (softmax(x, 0), log_softmax(x, -1)), plain().requires_grad_())


def test_softmax_of_what_was_computed() -> None:
    """What is dear is computed once."""
    check_fused(lambda x: softmax(x.tanh().exp(), -1), plain(4, 30).requires_grad_())


def normalized(x: Tensor, weight: Any = None, bias: Any = None, dims: int = 1) -> Tensor:
    """Layer norm over the last dimensions."""
    result: Tensor = layer_norm(x, x.shape[-dims:], weight, bias)
    return result


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one")])
def test_layer_norm_layouts(layout: str) -> None:
    """Over one and two dimensions of every layout, with gradients."""
    x = LAYOUTS[layout]()
    weight, bias = plain(*x.shape[1:]), plain(*x.shape[1:])
    given = [v.requires_grad_() for v in (x, weight, bias)]
    check_fused(lambda x, w, b: normalized(x, w, b, 2), *given)
    check_fused(lambda x, w, b: normalized(x, w[0], b[0]), *given)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", ["both", "weight", "bias", "neither"])
def test_layer_norm_types_and_parameters(dtype: torch.dtype, given: str) -> None:
    """Gradients of what is there, in every type."""
    module = nn.LayerNorm(33, dtype=dtype, elementwise_affine=given != "neither")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(plain(33))
    if given == "weight":
        module.bias = None
    if given == "bias":
        module.weight = None
    check_fused(module, plain(5, 4, 33, dtype=dtype).requires_grad_())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_layer_norm_gradients_of_some(wanted: tuple[int, ...]) -> None:
    """Only the gradients that somebody asks for."""
    given = [plain(6, 9), plain(9), plain(9)]
    for index in wanted:
        given[index].requires_grad_()
    check_fused(normalized, *given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_of_halves_with_wide_parameters(dtype: torch.dtype) -> None:
    """Eager takes halves with parameters of f32; statistics are f32 then."""
    x, weight, bias = plain(6, 40, dtype=dtype), plain(40), plain(40)
    check_fused(normalized, *[v.requires_grad_() for v in (x, weight, bias)])


def test_layer_norm_far_from_zero() -> None:
    """Large means, long rows."""
    for size in ((4, 40), (3, 5000)):
        check_fused(normalized, (plain(*size) + 100).requires_grad_())


def test_layer_norm_of_odd_values() -> None:
    """NaN and infinities stay within their row; equal elements give 0."""
    check_fused(normalized, odd_values())


def test_layer_norm_behind_a_sum() -> None:
    """The residual block: one kernel, what is normalized is returned as well."""

    def block(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Any:
        total = x + y
        return total, normalized(total, w, b), normalized(torch.tanh(total) * 2, w, b)

    given = [plain(5, 24), plain(5, 24), plain(24), plain(24)]
    check_fused(block, *[v.requires_grad_() for v in given])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    """The norm without a mean."""
    x, weight = plain(6, 40, dtype=dtype), plain(40, dtype=dtype)
    check_fused(
        lambda x, w: rms_norm(x, (40,), w, 1e-6), x.requires_grad_(), weight.requires_grad_()
    )


def test_symbolic_sizes() -> None:
    """Rows and columns that only the call knows."""

    def both(x: Tensor) -> Any:
        return normalized(x), softmax(x, -1), log_softmax(x, 0)

    check_fused(both, plain(7, 9).requires_grad_(), dynamic=True)
