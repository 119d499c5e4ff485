"""Hooks on tensors and modules, and backward run once, twice, in part."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check, compiled


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, x.sin()


# Hooks on tensors


def test_a_hook_on_an_input_sees_and_changes_its_gradient() -> None:
    seen: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(grad)
        return grad * 2

    x = leaf(3)
    x.register_hook(double)
    compiled(torch.sin)(x).sum().backward()
    assert torch.allclose(x.grad, 2 * seen[0])
    assert torch.allclose(seen[0], x.detach().cos())


def test_a_hook_on_an_output_changes_what_goes_back() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Tensor:
        out = fn(x)
        out.register_hook(lambda grad: grad * 3)
        return out

    check(lambda x: x.sin() * 2, leaf(3), use=use)


def test_a_hook_on_an_intermediate_inside_the_function_is_run() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 5)
        return y * 2

    check(fn, leaf(3))


def test_a_hook_registered_inside_on_an_input_is_run() -> None:
    def fn(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 5)
        return x.sin()

    check(fn, leaf(3))


def test_a_removed_hook_is_not_run() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Tensor:
        out = fn(x)
        out.register_hook(lambda grad: grad * 3).remove()
        return out

    check(lambda x: x.sin() * 2, leaf(3), use=use)


def test_a_kept_gradient_of_an_output_is_kept() -> None:
    x = leaf(3)
    out = compiled(lambda x: x * 2)(x)
    out.retain_grad()
    out.square().sum().backward()
    assert torch.allclose(out.grad, 2 * out.detach())


def test_a_hook_after_accumulation_sees_the_finished_gradient() -> None:
    model, seen = nn.Linear(3, 2), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    compiled(model)(torch.ones(4, 3)).sum().backward()
    assert [tuple(grad.shape) for grad in seen] in ([(2, 3), (2,)], [(2,), (2, 3)])
    assert all((grad == 4).all() for grad in seen)


def test_a_hook_over_several_tensors_fires_once_all_are_there() -> None:
    x, y = leaf(3), leaf(3)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((x, y), seen.append)
    compiled(torch.mul)(x, y).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0][0], y.detach())
    assert torch.equal(seen[0][1], x.detach())


def test_a_hook_on_the_node_of_an_output_is_run() -> None:
    calls: list[int] = []
    out = compiled(torch.sin)(leaf(3))
    out.grad_fn.register_hook(lambda grad_inputs, grad_outputs: calls.append(len(grad_outputs)))
    out.sum().backward()
    assert len(calls) == 1


# Hooks on modules


class Layer(nn.Module):
    """A linear layer and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


def test_forward_hooks_of_submodules_are_run() -> None:
    model = Layer()
    model.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.linear.register_forward_hook(lambda module, args, out: out + 1)
    check(model, leaf(2, 3))


def test_forward_hooks_of_the_compiled_module_are_run() -> None:
    model = Layer()
    model.register_forward_hook(lambda module, args, out: out * 3)
    check(model, leaf(2, 3))


def test_backward_hooks_of_submodules_change_the_gradient() -> None:
    model = Layer()
    model.linear.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))
    check(model, leaf(2, 3))


def test_backward_pre_hooks_of_submodules_change_the_gradient() -> None:
    model = Layer()
    model.linear.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 2,))
    check(model, leaf(2, 3))


# Backward in other ways


def test_backward_twice_over_a_retained_graph_adds_up() -> None:
    x = leaf(3)
    out = compiled(torch.sin)(x).sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * once)


def test_backward_three_times_over_a_retained_graph_gives_the_same_each_time() -> None:
    x, y = leaf(3), leaf(3)
    out = compiled(lambda x, y: (x * y).exp())(x, y).sum()
    grads = [torch.autograd.grad(out, (x, y), retain_graph=True) for _ in range(3)]
    for grad in grads[1:]:
        assert torch.equal(grad[0], grads[0][0])
        assert torch.equal(grad[1], grads[0][1])


def test_backward_twice_without_retaining_raises_as_eager_does() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> None:
        out = fn(x).sum()
        out.backward()
        out.backward()

    check(lambda x: x.sin().exp(), leaf(3), use=use)


def test_saved_tensors_are_freed_after_backward() -> None:
    freed: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = leaf(3)
    middle = Watched.apply(x)
    weakref.finalize(middle, freed.append, "middle")
    out = compiled(lambda y: y.sin().exp())(middle).sum()
    del middle
    assert not freed
    out.backward()
    assert freed == ["middle"]


def test_gradients_of_some_inputs_only() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        first, _ = fn(x, y)
        return torch.autograd.grad(first.sum(), y)

    check(product, leaf(3), leaf(3), use=use)


def test_backward_from_one_of_two_outputs() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        return fn(x, y)[0]

    check(product, leaf(3), leaf(3), use=use)


def test_backward_from_each_output_in_turn_over_a_retained_graph() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        first, second = fn(x, y)
        first.sum().backward(retain_graph=True)
        second.sum().backward()
        return x.grad.clone(), y.grad.clone()

    check(product, leaf(3), leaf(3), use=use)


def test_gradients_accumulate_over_calls() -> None:
    x, call = leaf(3), compiled(torch.sin)
    for _ in range(3):
        call(x).sum().backward()
    assert torch.allclose(x.grad, 3 * x.detach().cos())


def test_two_calls_of_one_function_in_one_graph_of_gradients() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Tensor:
        return fn(fn(x))

    check(lambda x: x.sin() * 2, leaf(3), use=use)


def test_the_compiled_function_inside_a_longer_eager_graph() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Tensor:
        return fn(x.exp()).cos()

    check(lambda x: x.sin() * 2, leaf(3), use=use)


def test_backward_into_inputs_without_accumulating_in_others() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        torch.autograd.backward(fn(x, y)[0].sum(), inputs=[y])
        return y.grad.clone()

    check(product, leaf(3), leaf(3), use=use)


def test_a_gradient_for_an_unused_input_raises_unless_allowed() -> None:
    def refuse(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad(fn(x, y)[1].sum(), (x, y))

    def allow(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad(fn(x, y)[1].sum(), (x, y), allow_unused=True)

    check(product, leaf(3), leaf(3), use=refuse)
    check(product, leaf(3), leaf(3), use=allow)


def test_backward_on_another_thread_gives_the_same() -> None:
    x = leaf(3)
    out = compiled(torch.sin)(x).sum()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.backward).result()
    assert torch.allclose(x.grad, x.detach().cos())


def test_a_failing_hook_raises_its_own_error() -> None:
    def refuse(grad: Tensor) -> Tensor:
        raise KeyError("from the hook")

    x = leaf(3)
    x.register_hook(refuse)
    out = compiled(torch.sin)(x).sum()
    with pytest.raises(KeyError, match="from the hook"):
        out.backward()


@pytest.mark.filterwarnings("ignore")  # that the mode is on, and where the NaN came from
def test_anomaly_mode_names_a_nan_in_backward_as_eager_does() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            fn(x).sum().backward()

    check(lambda x: torch.sqrt(x) * 0, torch.zeros(2, requires_grad=True), use=use)
