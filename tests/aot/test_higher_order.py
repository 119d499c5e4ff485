"""Derivatives of derivatives: create_graph to any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from tests.parity import check, compiled

Make = Callable[[], tuple[Tensor, ...]]


def wide(*shape: int) -> Tensor:
    """A random float64 input, as numerical derivatives need."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positive(*shape: int) -> Tensor:
    return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()


def small(*shape: int) -> Tensor:
    """Between -0.8 and 0.8."""
    return (torch.rand(*shape, dtype=torch.float64) * 1.6 - 0.8).requires_grad_()


INDEX = torch.tensor([[0, 2], [1, 0]])
TARGET = torch.tensor([0, 2])

# name: the function, and its inputs
OPERATORS: dict[str, tuple[Callable[..., Any], Make]] = {
    "add": (lambda x, y: (x + y) * x, lambda: (wide(2), wide(2))),
    "sub": (lambda x, y: (x - y) * y, lambda: (wide(2), wide(2))),
    "mul": (torch.mul, lambda: (wide(2, 1), wide(3))),
    "div": (torch.div, lambda: (wide(2), positive(2))),
    "pow": (torch.pow, lambda: (positive(2), wide(2))),
    "pow_scalar": (lambda x: x**3, lambda: (wide(2),)),
    "exp": (torch.exp, lambda: (wide(2),)),
    "expm1": (torch.expm1, lambda: (wide(2),)),
    "log": (torch.log, lambda: (positive(2),)),
    "log1p": (torch.log1p, lambda: (positive(2),)),
    "sqrt": (torch.sqrt, lambda: (positive(2),)),
    "rsqrt": (torch.rsqrt, lambda: (positive(2),)),
    "reciprocal": (torch.reciprocal, lambda: (positive(2),)),
    "sin": (torch.sin, lambda: (wide(2),)),
    "cos": (torch.cos, lambda: (wide(2),)),
    "tan": (torch.tan, lambda: (small(2),)),
    "asin": (torch.asin, lambda: (small(2),)),
    "atan": (torch.atan, lambda: (wide(2),)),
    "atan2": (torch.atan2, lambda: (positive(2), positive(2))),
    "sinh": (torch.sinh, lambda: (wide(2),)),
    "tanh": (torch.tanh, lambda: (wide(2),)),
    "erf": (torch.erf, lambda: (wide(2),)),
    "sigmoid": (torch.sigmoid, lambda: (wide(2),)),
    "softplus": (F.softplus, lambda: (wide(2),)),
    "silu": (F.silu, lambda: (wide(2),)),
    "gelu": (F.gelu, lambda: (wide(2),)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda: (wide(2),)),
    "mish": (F.mish, lambda: (wide(2),)),
    "elu": (F.elu, lambda: (wide(2),)),
    "softmax": (lambda x: x.softmax(-1), lambda: (wide(2, 3),)),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda: (wide(2, 3),)),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda: (wide(2, 3),)),
    "sum": (lambda x: x.sum(0) * x, lambda: (wide(2, 3),)),
    "mean": (lambda x: x.mean() * x, lambda: (wide(2, 3),)),
    "var": (lambda x: x.var(-1), lambda: (wide(2, 3),)),
    "prod": (lambda x: x.prod(-1), lambda: (positive(2, 3),)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda: (positive(2, 3),)),
    "cumsum": (lambda x: x.cumsum(-1) * x, lambda: (wide(2, 3),)),
    "mm": (torch.mm, lambda: (wide(2, 3), wide(3, 2))),
    "bmm": (torch.bmm, lambda: (wide(2, 2, 3), wide(2, 3, 2))),
    "addmm": (torch.addmm, lambda: (wide(2), wide(2, 3), wide(3, 2))),
    "linear": (F.linear, lambda: (wide(2, 3), wide(2, 3), wide(2))),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), lambda: (wide(2, 3), wide(2, 3))),
    "outer": (torch.outer, lambda: (wide(2), wide(3))),
    "conv1d": (F.conv1d, lambda: (wide(1, 2, 4), wide(2, 2, 3), wide(2))),
    "conv2d": (F.conv2d, lambda: (wide(1, 1, 3, 3), wide(1, 1, 2, 2))),
    "layer_norm": (lambda x, w: F.layer_norm(x, (3,), w), lambda: (wide(2, 3), wide(3))),
    "group_norm": (lambda x: F.group_norm(x, 1), lambda: (wide(2, 2, 2),)),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda: (wide(3, 2),),
    ),
    "gather": (lambda x: x.gather(1, INDEX) ** 2, lambda: (wide(2, 3),)),
    "scatter_add": (lambda x, y: x.scatter_add(1, INDEX, y) ** 2, lambda: (wide(2, 3), wide(2, 2))),
    "index": (lambda x: x[[1, 0]] ** 2, lambda: (wide(2, 3),)),
    "embedding": (lambda w: F.embedding(INDEX, w) ** 2, lambda: (wide(3, 2),)),
    "cat": (lambda x, y: torch.cat([x, y]) ** 2, lambda: (wide(2), wide(3))),
    "where": (lambda x, y: torch.where(x > 0, x * y, y**2), lambda: (wide(3), wide(3))),
    "clamp": (lambda x: x.clamp(-0.5, 0.5) ** 2, lambda: (wide(3),)),
    "mse_loss": (F.mse_loss, lambda: (wide(3), wide(3))),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET), lambda: (wide(2, 3),)),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y),
        lambda: (wide(3), positive(3).detach()),
    ),
    "attention": (
        lambda q, k, v: F.softmax(q @ k.mT, -1) @ v,
        lambda: (wide(2, 2), wide(3, 2), wide(3, 2)),
    ),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2) ** 2, lambda: (wide(1, 1, 4, 4),)),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") ** 2,
        lambda: (wide(1, 1, 2, 2),),
    ),
    "inverse": (
        torch.inverse,
        lambda: (wide(2, 2).detach().add(3 * torch.eye(2)).requires_grad_(),),
    ),
    "complex_mul": (
        lambda x, y: (torch.complex(x, y) ** 2).abs(),
        lambda: (positive(2), positive(2)),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_derivative_agrees_with_the_numerical_one(name: str) -> None:
    fn, make = OPERATORS[name]
    assert torch.autograd.gradgradcheck(compiled(fn), make(), fast_mode=True)


def gradient(fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """The first derivative, still differentiable."""
    return grad(fn(*inputs).sum(), inputs, create_graph=True)


def second(fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """The second derivative, still differentiable."""
    first = grad(fn(*inputs).sum(), inputs, create_graph=True)
    return grad(sum(g.square().sum() for g in first), inputs, create_graph=True)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_double_backward_agrees_with_eager() -> None:
    check(lambda x, y: (x * y).sin().exp(), leaf(3), leaf(3), use=gradient)


def test_triple_backward_agrees_with_eager() -> None:
    check(lambda x, y: (x * y).sin().exp(), leaf(3), leaf(3), use=second)


def test_the_fourth_derivative_of_a_polynomial_is_exact() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    value, derivatives = compiled(lambda x: x**5)(x), []
    for _ in range(5):
        (value,) = grad(value, x, create_graph=True)
        derivatives.append(value.item())
    assert derivatives == [80.0, 160.0, 240.0, 240.0, 120.0]


def test_a_derivative_that_does_not_depend_on_the_input_has_no_derivative() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        (first,) = grad(fn(x, y).sum(), x, create_graph=True)
        return first

    check(lambda x, y: x * y, leaf(3), leaf(3), use=use)  # dx is y: none for x, ones for y


def test_create_graph_once_and_plain_backward_once_on_one_function() -> None:
    call, x = compiled(lambda x: x.sin() * x), leaf(3)
    call(x).sum().backward()
    plain = x.grad.clone()
    (with_graph,) = grad(call(x).sum(), x, create_graph=True)
    assert with_graph.requires_grad
    assert torch.allclose(plain, with_graph)


def test_double_backward_twice_over_a_retained_graph_gives_the_same() -> None:
    x = leaf(3)
    (first,) = grad(compiled(lambda x: x.sin() * x)(x).sum(), x, create_graph=True)
    one = grad(first.sum(), x, retain_graph=True)[0]
    two = grad(first.sum(), x)[0]
    assert torch.equal(one, two)


def test_the_first_derivative_without_a_graph_has_no_history() -> None:
    (first,) = grad(compiled(torch.sin)(x := leaf(3)).sum(), x)
    assert not first.requires_grad


def test_double_backward_with_respect_to_the_cotangent() -> None:
    def use(fn: Callable[..., Any], x: Tensor, v: Tensor) -> Any:
        (product,) = grad(fn(x), x, v, create_graph=True)
        return product

    check(lambda x: x.sin() * x, leaf(3), leaf(3), use=use)


def test_a_forward_derivative_by_two_backwards() -> None:
    def use(fn: Callable[..., Any], x: Tensor, v: Tensor) -> Any:
        u = torch.ones(3, requires_grad=True)
        (pulled,) = grad(fn(x), x, u, create_graph=True)
        return grad(pulled, u, v, create_graph=True)[0]

    check(lambda x: x.sin() * x, leaf(3), leaf(3), use=use)


def test_a_hessian_vector_product_agrees_with_eager() -> None:
    def use(fn: Callable[..., Any], x: Tensor, v: Tensor) -> Any:
        (first,) = grad(fn(x), x, create_graph=True)
        return grad((first * v).sum(), x, create_graph=True)[0]

    check(lambda x: (x**3).sum() + x.prod(), leaf(4), torch.randn(4), use=use)


def test_a_whole_hessian_agrees_with_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x**3).sum() * x.sin().sum()

    x = wide(3)
    ours = torch.autograd.functional.hessian(compiled(fn), x)
    torch.testing.assert_close(ours, torch.autograd.functional.hessian(fn, x))


def test_an_output_that_is_not_used_gives_no_second_derivative() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        first, _ = fn(x, y)
        return grad(first.sum(), x, create_graph=True)[0]

    check(lambda x, y: (x.sin(), y.exp()), leaf(3), leaf(3), use=use)


def test_a_view_output_has_second_derivatives() -> None:
    check(lambda x: (x.sin() * x).t()[1:], leaf(2, 3), use=gradient)


def test_a_mutated_input_has_second_derivatives() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(w)
        return y.sin()

    check(fn, leaf(3), leaf(3), use=gradient)


def test_second_derivatives_at_another_size_after_the_first() -> None:
    call = compiled(lambda x: (x**3).sum(), dynamic=True)
    for size in (3, 5):
        x = leaf(size)
        (first,) = grad(call(x), x, create_graph=True)
        assert torch.allclose(grad(first.sum(), x)[0], 6 * x.detach())


class Potential(nn.Module):
    """A smooth energy of particle positions: a small network over pair distances."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        apart = positions[:, None] - positions[None, :]
        row, column = torch.triu_indices(len(positions), len(positions), 1)
        distance = apart[row, column].square().sum(-1).sqrt()
        return self.net(distance[:, None]).sum()


def force_loss(energy: Callable[..., Any], positions: Tensor, forces: Tensor) -> Tensor:
    """How far the model's forces, the negative gradient of its energy, are from the given."""
    (slope,) = grad(energy(positions), positions, create_graph=True)
    return F.mse_loss(-slope, forces)


def test_matching_forces_trains_the_parameters_as_eager_does() -> None:
    check(Potential(), leaf(4, 3), torch.randn(4, 3), use=force_loss, calls=2)


def test_force_matching_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = Potential()
    energy = compiled(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    positions, forces = leaf(4, 3), torch.randn(4, 3) * 0.1
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = force_loss(energy, positions, forces)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_gradient_penalty_trains_the_parameters_as_eager_does() -> None:
    def use(critic: Callable[..., Any], x: Tensor) -> Tensor:
        (slope,) = grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()

    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    check(critic, leaf(4, 3), use=use)


def test_a_step_of_a_step_trains_through_the_inner_update() -> None:
    def use(loss: Callable[..., Any], w: Tensor, x: Tensor) -> Tensor:
        (slope,) = grad(loss(w, x), w, create_graph=True)
        out: Tensor = loss(w - 0.1 * slope, x)
        return out

    check(lambda w, x: ((x @ w).tanh() ** 2).mean(), leaf(3, 2), torch.randn(4, 3), use=use)
