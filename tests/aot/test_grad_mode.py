"""Grad mode, inside and around: what has history, and what is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check, compiled


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_no_grad_inside_cuts_the_history() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = x * 2
        return y, x * 3

    check(fn, leaf(3))


def test_no_grad_inside_cuts_only_its_part_of_a_sum() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale

    check(fn, leaf(3))


def test_enable_grad_inside_no_grad_records_again() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
        return y, z

    check(fn, leaf(3))


def test_enable_grad_inside_a_call_without_it_records() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        with torch.enable_grad():
            z = x * 3
        return y, z

    with torch.no_grad():
        check(fn, leaf(3))


def test_nothing_has_history_when_the_call_is_without_grad() -> None:
    with torch.no_grad():
        check(lambda x: x.sin(), leaf(3))


def test_inference_mode_around_the_call_gives_inference_tensors() -> None:
    with torch.inference_mode():
        check(lambda x: x.sin() * 2, torch.randn(3))


def test_a_grad_mode_set_by_the_function_stays_set() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    check(fn, leaf(3))
    assert torch.is_grad_enabled()


def test_a_decorated_part_is_without_history() -> None:
    @torch.no_grad()
    def statistics(x: Tensor) -> Tensor:
        return x.mean()

    check(lambda x: x - statistics(x), leaf(3))


def test_detach_cuts_the_history_of_one_path() -> None:
    check(lambda x: x * x.detach(), leaf(3))


def test_an_input_that_requires_no_grad_gets_none() -> None:
    check(torch.mul, leaf(3), torch.randn(3))


def test_an_input_that_is_not_used_gets_none() -> None:
    check(lambda x, y: x * 2, leaf(3), leaf(3))


def test_an_integer_output_beside_a_float_one_has_no_history() -> None:
    check(lambda x: (x.argmax(), x.max(), (x > 0), x.sort().indices), leaf(5))


def test_without_inputs_that_require_grad_nothing_has_history() -> None:
    check(lambda x, y: x @ y, torch.randn(2, 3), torch.randn(3, 2))


def test_one_function_serves_calls_with_and_without_grad() -> None:
    call, x = compiled(torch.sin), leaf(3)
    assert call(x).requires_grad
    with torch.no_grad():
        assert not call(x).requires_grad
    assert call(x).requires_grad
    assert not call(x.detach()).requires_grad


def test_a_frozen_parameter_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    check(model, torch.randn(4, 3))


def test_a_parameter_frozen_after_compilation_gets_no_gradient() -> None:
    model = nn.Linear(3, 2)
    call = compiled(model)
    call(torch.randn(4, 3)).sum().backward()
    model.zero_grad()
    model.weight.requires_grad_(False)
    call(torch.randn(4, 3)).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None


@pytest.mark.parametrize("train", [True, False])
def test_training_and_evaluation_differ_as_in_eager(train: bool) -> None:
    # No bias, which batch norm would take away again: its gradient would be nothing but roundings.
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh()).train(train)
    check(model, torch.randn(5, 3), calls=2)


def test_one_module_serves_training_and_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    call, x = compiled(model), torch.randn(5, 4) + 3
    trained = call(x)
    model.eval()
    assert not torch.equal(call(x), trained)
    torch.testing.assert_close(call(x), model(x))


def test_a_gradient_taken_inside_the_function_is_right() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        (slope,) = torch.autograd.grad(y.sum(), x)
        return slope * 2

    check(fn, leaf(3), expect_graph=False)


def test_functional_gradients_inside_the_function_are_compiled() -> None:
    def fn(x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda y: (y**3).sum())(x)
        return slope * 2

    check(fn, leaf(3), fullgraph=True)


def test_vectorised_functions_inside_are_compiled() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        rows: Tensor = torch.vmap(lambda row: (row @ w).sin())(x)
        return rows * 2

    check(fn, leaf(4, 3), leaf(3, 2), fullgraph=True)


def test_a_jacobian_of_the_compiled_function_is_right() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * x.sum()

    x = torch.randn(3)
    ours = torch.autograd.functional.jacobian(compiled(fn), x)
    torch.testing.assert_close(ours, torch.autograd.functional.jacobian(fn, x))


def test_the_same_tensor_with_and_without_grad_is_compiled_for_both() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        return fn(x), fn(x.detach())

    check(lambda x: x.sin() * 2, leaf(3), use=use)
