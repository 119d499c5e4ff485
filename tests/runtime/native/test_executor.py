"""Compiled functions give the same bits by machine code and by Python, and what eager gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.native.executors import agree, agree_over, compiled, require_same, seen

aten = torch.ops.aten
Inputs = tuple[Any, ...]


def rand(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype)


def whole(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, 5, size, dtype=dtype)


def learned(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def with_odd_values() -> Tensor:
    odd = rand(4, 4)
    odd[0, 1], odd[1, 2], odd[2, 3], odd[3, 0] = math.nan, math.inf, -math.inf, -0.0
    return odd


# --- operators: C functions that get memory, C functions that make it, Python ---

OPERATORS: Final[dict[str, tuple[Callable[..., Any], Callable[[], Inputs]]]] = {
    "softmax": (lambda x: x.softmax(-1), lambda: (rand(3, 7),)),
    "softmax between mm": (lambda x, y: (x @ y).softmax(0) @ y, lambda: (rand(5, 5), rand(5, 5))),
    "odd values": (lambda x: ((x @ x).relu(), x.amax(0), x.sort()), lambda: (with_odd_values(),)),
    "mm": (lambda x, y: (x @ y).sin(), lambda: (rand(3, 4), rand(4, 5))),
    "mm of one": (lambda x, y: (x @ y) + 1, lambda: (rand(1, 1), rand(1, 1))),
    "addmm": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=-2).cos(),
        lambda: (rand(5), rand(3, 4), rand(4, 5)),
    ),
    "addmm without its NaN": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0),
        lambda: (torch.full((3, 5), math.nan), rand(3, 4), rand(4, 5)),
    ),
    "bmm": (lambda x, y: torch.bmm(x, y).tanh(), lambda: (rand(2, 3, 4), rand(2, 4, 5))),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y, beta=0.3, alpha=3).exp(),
        lambda: (rand(2, 3, 5), rand(2, 3, 4), rand(2, 4, 5)),
    ),
    "linear": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: (rand(6, 4), rand(5, 4), rand(5)),
    ),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1).relu(),
        lambda: (rand(2, 3, 9, 8), rand(4, 3, 3, 3), rand(4)),
    ),
    "conv without bias, in groups": (
        lambda x, w: F.conv1d(x * 2, w, groups=2, dilation=2),
        lambda: (rand(2, 4, 12), rand(6, 2, 3)),
    ),
    "transposed conv": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1).sum(0),
        lambda: (rand(2, 3, 5, 5), rand(3, 4, 3, 3)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q + 1, k, v, is_causal=True, scale=0.3),
        lambda: (rand(2, 2, 5, 8), rand(2, 2, 5, 8), rand(2, 2, 5, 8)),
    ),
    "attention with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m * 2) + 1,
        lambda: (rand(1, 2, 5, 8), rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(5, 6)),
    ),
    "topk": (lambda x: torch.topk(x * 2, 2, largest=False), lambda: (rand(3, 8),)),
    "sort": (lambda x: torch.sort(x * 2, dim=0, descending=True), lambda: (rand(4, 5),)),
    "stable sort": (lambda x: torch.sort(x + 1, stable=True), lambda: (whole(4, 9),)),
    "bags": (
        lambda w, i, o: F.embedding_bag(i, w * 2, o, mode="sum"),
        lambda: (rand(10, 4), torch.randint(0, 10, (7,)), torch.tensor([0, 3])),
    ),
    "weighed bags": (
        lambda w, i, s: F.embedding_bag(i, w, per_sample_weights=s.exp(), mode="sum"),
        lambda: (rand(10, 4), torch.randint(0, 10, (7, 2)), rand(7, 2)),
    ),
    "embedding": (lambda w, i: F.embedding(i, w) @ w.t(), lambda: (rand(9, 4), whole(3, 2))),
    "gather": (lambda x, i: x.gather(1, i).cumsum(1), lambda: (rand(4, 5), whole(4, 3))),
    "scatter": (
        lambda x, i, y: x.scatter_add(1, i, y),
        lambda: (rand(4, 5), whole(4, 3), rand(4, 3)),
    ),
    "index put": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True) @ x.t(),
        lambda: (rand(5, 4), whole(3), rand(3, 4)),
    ),
    "advanced index": (lambda x, i: (x[i], x[:, i % 4], x[i > 2]), lambda: (rand(5, 4), whole(5))),
    "nonzero": (lambda x: (x > 0).nonzero(), lambda: (rand(3, 4),)),
    "linear algebra": (lambda x: torch.linalg.qr(x @ x.t())[1].abs(), lambda: (rand(4, 4),)),
    "random numbers": (lambda x: x + torch.randn(4) + F.dropout(x, 0.5), lambda: (rand(4),)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_same_bits(name: str) -> None:
    function, make = OPERATORS[name]

    agree_over(function, [make()], dynamic=False if name in ("nonzero", "advanced index") else None)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch alone"])
def test_without_kernels_too(kernels: bool) -> None:
    def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.layer_norm(x @ w, (4,))
        first, second = y.split(2)
        return first.t() @ second, y.max(0).indices, y[1:, -1]

    import stator

    inputs = (rand(4, 4), rand(4, 4))
    runs = [
        seen(stator.aot_function(mixed, executor=name, strict=True, kernels=kernels), inputs, False)
        for name in ("native", "python")
    ]
    require_same(*runs)


# --- types ---

TYPES: Final = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_elements_of_every_type(dtype: torch.dtype) -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = (x @ y) + x
        return z, z[1:].t(), z.sort().indices, z.sum(), (z @ z)[-1]

    made = (rand(4, 4) * 3).to(dtype), (rand(4, 4) * 2).to(dtype)

    agree(both, *made, eager=False)


def test_truth_values() -> None:
    agree(lambda x, y: (x & ~y, x.any(0), x.sort()[0], x.sum(1)), rand(4, 5) > 0, rand(4, 5) > 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_go_through_python(dtype: torch.dtype) -> None:
    def complex_work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.addmm(y, x @ y, x, alpha=1j)
        return z, z.conj() @ x, z.real.t() @ x.imag, torch.bmm(z[None], z[None])

    agree(complex_work, rand(3, 3, dtype=dtype), rand(3, 3, dtype=dtype).conj())


def test_types_that_kernels_do_not_know() -> None:
    agree(lambda x: (x.t(), x.view(-1)), whole(2, 3).to(torch.uint16))
    agree(lambda x: (x.t(), x.float() @ x.float().t()), rand(2, 3).to(torch.float8_e5m2))


def test_a_negation_that_is_still_to_be_done() -> None:
    x = rand(3, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg()

    agree(lambda x, y: (x @ y, x + 1, x.t(), x[1:]), x, rand(4, 3))


def test_factors_keep_all_their_digits() -> None:
    ones = torch.ones(2, 2, dtype=torch.int64)

    agree(lambda x: torch.addmm(x, x, x, alpha=2**53 + 1), ones)
    agree(lambda x: torch.addmm(x, x, x, alpha=-(2**62)), ones)
    agree(lambda x: torch.addmm(x, x, x, beta=0.1, alpha=1e-30), torch.ones(2, 2).double())


# --- modes ---


def layers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = F.relu(x @ w)
    return y @ w.t(), y[1:], x.t()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_of_the_mode_s_kind(mode: Callable[[], Any]) -> None:
    with mode():
        agree(layers, rand(300, 300), rand(300, 300), eager=False)
        agree(layers, rand(3, 4), rand(4, 5))


def test_autocast() -> None:
    def cast(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            return y, (y @ w).float().softmax(-1), F.linear(y, w)

    agree(cast, rand(8, 8), rand(8, 8), eager=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(layers, rand(8, 8), rand(8, 8), eager=False)


# --- training ---

TRAINED: Final[dict[str, tuple[Callable[..., Any], Callable[[], Inputs]]]] = {
    "mm": (lambda x, w: F.gelu(x @ w) @ w.t(), lambda: (learned(4, 3), learned(3, 5))),
    "addmm": (
        lambda b, x, w: torch.addmm(b, x, w).sin(),
        lambda: (learned(5), learned(3, 4), learned(4, 5)),
    ),
    "bmm": (lambda x, y: torch.bmm(x, y).softmax(-1), lambda: (learned(2, 3, 4), learned(2, 4, 3))),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
        lambda: (learned(2, 3, 6, 6), learned(4, 3, 3, 3), learned(4)),
    ),
    "conv of data": (
        lambda x, w: F.conv2d(x, w).square().mean(),
        lambda: (rand(2, 3, 6, 6), learned(4, 3, 3, 3)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda: (learned(1, 2, 5, 8), learned(1, 2, 5, 8), learned(1, 2, 5, 8)),
    ),
    "norm": (lambda x, w: F.layer_norm(x, (6,), w), lambda: (learned(4, 6), learned(6))),
    "bags": (
        lambda w, i: F.embedding_bag(i, w, mode="mean"),
        lambda: (learned(10, 4), torch.randint(0, 10, (7, 2))),
    ),
    "views": (lambda x: (x.t()[1:], x[-1], x.expand(2, 4, 3)), lambda: (learned(4, 3),)),
    "index": (lambda x, i: x[i].cumsum(0), lambda: (learned(5, 4), whole(3))),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_have_the_same_bits(name: str) -> None:
    function, make = TRAINED[name]

    agree(function, *make(), grad=True)


@pytest.mark.parametrize("present", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_some_tangents_may_be_missing(present: tuple[int, ...]) -> None:
    def three(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return y.sin(), (y @ w).t(), (w.exp() * 2)[1:]

    def some(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: [call(*given)[i] for i in present]

    inputs = (learned(4, 4), learned(4, 4))
    runs = [seen(some(compiled(three, name)), inputs, True) for name in ("native", "python")]

    require_same(*runs)


@pytest.mark.parametrize(
    "tangent",
    [torch.ones(()).expand(4, 5), torch.arange(20.0).view(5, 4).t(), torch.ones(8, 10)[::2, ::2]],
    ids=["expanded", "transposed", "with steps"],
)
def test_tangents_lie_as_the_caller_has_them(tangent: Tensor) -> None:
    def backward(name: str) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = learned(4, 3), learned(3, 5)
        compiled(lambda x, w: x @ w, name)(x, w).backward(tangent)
        return [x.grad, w.grad]

    for mine, other in zip(backward("native"), backward("python"), strict=True):
        assert torch.equal(mine, other)


def test_a_backward_pass_may_run_twice() -> None:
    x, w = learned(40, 40), learned(40, 40)
    y = compiled(lambda x, w: torch.sin(x @ w) @ w, "native")(x, w)

    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, w))

    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
