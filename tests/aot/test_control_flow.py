"""Higher-order operators as Dynamo hands them over: branches, loops, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tests.parity import check


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def gradient(fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """The first derivative, still differentiable."""
    return torch.autograd.grad(fn(*inputs).sum(), inputs, create_graph=True)


# Branches


def sin_or_cos(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos() * 2, (x,))
    return out


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["true", "false"])
def test_a_branch_is_taken_by_data(sign: float) -> None:
    check(sin_or_cos, torch.full((3,), sign), fullgraph=True)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["true", "false"])
def test_the_branch_taken_gives_the_gradient(sign: float) -> None:
    check(sin_or_cos, torch.full((3,), sign, requires_grad=True), fullgraph=True)


def test_branches_close_over_other_tensors() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.sum() > 0, lambda y: y @ w, lambda y: w @ y, (x,))
        return out * 2

    check(fn, torch.ones(2, 2, requires_grad=True), leaf(2, 2), fullgraph=True)


def test_a_branch_inside_a_branch() -> None:
    def inner(x: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.max() > 2, lambda y: y * 2, lambda y: y * 3, (x,))
        return out

    def fn(x: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.sum() > 0, inner, lambda y: y - 1, (x,))
        return out

    check(fn, torch.tensor([3.0, 1.0]), fullgraph=True)


def test_branches_return_several_results() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = torch.cond(
            x.sum() > 0, lambda y: (y + 1, y * 2), lambda y: (y - 1, y * 3), (x,)
        )
        return out

    check(fn, torch.ones(3), fullgraph=True)


class Gate(nn.Module):
    """Two experts and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.mean() > 0, self.left, self.right, (x,))
        return out


def test_branches_use_parameters() -> None:
    check(Gate(), torch.ones(2, 3), fullgraph=True)


# Loops


def test_a_loop_runs_until_its_condition_fails() -> None:
    def fn(x: Tensor) -> Tensor:
        count, total = while_loop(
            lambda i, acc: i < 4, lambda i, acc: (i + 1, acc * 2 + i), (torch.tensor(0), x)
        )
        return total + count

    check(fn, torch.randn(3), fullgraph=True)


def test_a_loop_that_depends_on_data_runs_as_often_as_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        (out,) = while_loop(lambda y: y.norm() < 10, lambda y: (y * 2,), (x,))
        return out

    check(fn, torch.ones(3), fullgraph=True)
    check(fn, torch.ones(3) * 100, fullgraph=True)


def test_a_loop_that_never_runs_gives_its_start() -> None:
    def fn(x: Tensor) -> Tensor:
        (out,) = while_loop(lambda y: y.sum() > 1e9, lambda y: (y * 2,), (x,))
        return out + 1

    check(fn, torch.ones(3), fullgraph=True)


def test_a_map_over_rows() -> None:
    check(lambda x: torch_map(lambda row: row.sin() * 2, x), torch.randn(4, 3), fullgraph=True)


def test_a_map_over_rows_trains() -> None:
    check(
        lambda x, w: torch_map(lambda row, v: (row * v).sin(), x, w),
        leaf(4, 3),
        leaf(3),
        fullgraph=True,
    )


def test_a_scan_carries_its_state() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new = carry * 0.5 + x
        return new, new.sin()

    check(lambda start, xs: scan(step, start, xs, dim=0), torch.zeros(3), torch.randn(4, 3))


def test_a_scan_trains() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry.sin() * x, carry.cos() + x

    check(lambda start, xs: scan(step, start, xs, dim=0), leaf(3), leaf(4, 3), fullgraph=True)


def test_an_associative_scan_gives_running_sums() -> None:
    def fn(x: Tensor) -> Tensor:
        out: Tensor = associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic")
        return out * 2

    check(fn, torch.randn(4, 3), fullgraph=True)


# Functions of the user's own


class Cube(torch.autograd.Function):
    """x**3, with a gradient off by a factor of two so that it shows whose was used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 6 * x**2


class Mix(torch.autograd.Function):
    """Two inputs, a constant, two outputs, an intermediate saved, one input without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        product = x * y
        ctx.save_for_backward(product, y)
        ctx.scale = scale
        return product * scale, product.exp()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None, None]:
        product, y = ctx.saved_tensors
        return (first * ctx.scale + second * product.exp()) * y, None, None


def test_a_function_of_the_users_own_uses_its_own_gradient() -> None:
    check(lambda x: Cube.apply(x.sin()) * 2, leaf(3), fullgraph=True)


def test_a_function_with_several_inputs_and_outputs() -> None:
    check(lambda x, y: Mix.apply(x, y, 3.0), leaf(3), leaf(3), fullgraph=True)


def test_a_function_of_the_users_own_in_inference() -> None:
    check(lambda x: Cube.apply(x) * 2, torch.randn(3), fullgraph=True)
    with torch.no_grad():
        check(lambda x: Cube.apply(x) * 2, leaf(3), fullgraph=True)


def test_a_function_of_the_users_own_applied_twice() -> None:
    check(lambda x: Cube.apply(Cube.apply(x)), leaf(3), fullgraph=True)


def test_double_backward_through_a_function_of_the_users_own() -> None:
    check(lambda x: Cube.apply(x).sin(), leaf(3), use=gradient)


def test_a_function_that_marks_its_output_as_without_gradient() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            whole = x.round()
            ctx.mark_non_differentiable(whole)
            return x * 2, whole

        @staticmethod
        def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
            return grad * 2

    check(lambda x: Rounded.apply(x * 3), leaf(3))


def test_a_straight_through_gradient() -> None:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clamp(-1, 1)

    check(lambda x: Sign.apply(x * 2) * x, leaf(3), fullgraph=True)


def test_a_function_of_the_users_own_inside_a_checkpoint() -> None:
    def fn(x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(
            lambda y: Cube.apply(y).exp(), x, use_reentrant=False
        )
        return out

    check(fn, leaf(3))
