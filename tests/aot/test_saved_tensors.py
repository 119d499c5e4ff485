"""What forward keeps for backward: checked, hooked, no more than needed, freed in time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.parity import check, compiled

MODIFIED = "modified by an inplace operation"


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def packed_by(fn: Callable[..., Any], *inputs: Any) -> list[tuple[int, ...]]:
    """Shapes of the tensors that the call keeps for backward."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        fn(*inputs)
    return shapes


# Version checks


def test_writing_to_a_saved_input_before_backward_raises_as_eager_does() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> None:
        y = x * 1
        out = fn(y)
        y.add_(1)
        out.sum().backward()

    check(lambda x: x.sin().exp(), leaf(3), use=use)


def test_writing_to_a_saved_output_before_backward_raises_as_eager_does() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> None:
        out = fn(x)
        out.mul_(2)
        out.sum().backward()

    check(lambda x: x.exp(), leaf(3), use=use)


def test_writing_to_a_saved_input_without_history_raises_as_eager_does() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> None:
        out = fn(x, y)
        y.add_(1)
        out.sum().backward()

    check(lambda x, y: x * y, leaf(3), torch.randn(3), use=use)


def test_writing_to_an_input_that_is_not_needed_is_fine() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        out = fn(x, y)
        y.add_(1)
        return out

    check(lambda x, y: x * 2 + y, leaf(3), torch.randn(3), use=use)


def test_an_optimizer_step_before_backward_raises_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    call = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(torch.randn(2, 3)).sum().backward()
    out = call(torch.randn(2, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        out.backward()


def test_writing_to_a_buffer_saved_by_an_earlier_call_raises_as_eager_does() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = Scaled()
    out = compiled(module)(leaf(3)).sum()
    module.scale.mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        out.backward()


def test_a_write_inside_the_function_does_not_disturb_its_own_backward() -> None:
    def fn(x: Tensor, counter: Tensor) -> Tensor:
        scaled = x * counter.clone()
        counter.add_(1)
        return scaled.sin() * counter

    check(fn, leaf(3), torch.ones(3), calls=2)


# Hooks


def test_hooks_around_the_call_see_what_is_saved_and_give_it_back() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        with saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
            return fn(x)

    check(lambda x: x.sin().exp() * x, leaf(3), use=use)
    assert packed_by(compiled(lambda x: x.sin()), leaf(3)) == [(3,)]


def test_what_the_hooks_give_back_is_what_backward_uses() -> None:
    x = leaf(3)
    call = compiled(lambda x: x * x)
    with saved_tensors_hooks(lambda t: t, lambda t: t * 10):
        out = call(x)
    out.sum().backward()
    assert torch.allclose(x.grad, 20 * x.detach())


def test_saving_elsewhere_gives_the_same_gradients() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        with save_on_cpu():
            return fn(x)

    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    check(model, torch.randn(5, 3), use=use)


def test_hooks_inside_the_function_are_obeyed() -> None:
    def fn(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return x.sin() * x

    check(fn, leaf(3))


# No more than needed


def test_a_gradient_that_needs_no_values_saves_none() -> None:
    assert packed_by(compiled(lambda x: (x * 2 + 1).sum(0)), leaf(4, 3)) == []


def test_a_call_without_grad_saves_nothing() -> None:
    with torch.no_grad():
        assert packed_by(compiled(lambda x: x.sin().exp()), leaf(4, 3)) == []
    assert packed_by(compiled(lambda x: x.sin().exp()), torch.randn(4, 3)) == []


def test_no_more_is_saved_than_in_eager() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w, -1) * 3

    eager = packed_by(fn, leaf(4, 5), leaf(5, 6))
    assert sum(map(sum, packed_by(compiled(fn), leaf(4, 5), leaf(5, 6)))) <= sum(map(sum, eager))


def test_an_intermediate_that_backward_does_not_need_is_not_kept() -> None:
    shapes = packed_by(
        compiled(lambda x: (x[:, None] + torch.ones(50, 1)).sum(1).sin()), leaf(4, 3)
    )
    assert all(len(shape) < 3 for shape in shapes)


# Freed in time


def test_a_saved_output_is_freed_without_the_garbage_collector() -> None:
    out = compiled(lambda x: x.exp())(leaf(3))
    freed: list[str] = []
    weakref.finalize(out, freed.append, "out")
    gc.disable()
    try:
        del out
        assert freed == ["out"]
    finally:
        gc.enable()


def test_a_saved_input_lives_as_long_as_the_graph_and_no_longer() -> None:
    y = leaf(3) * 1
    freed: list[str] = []
    weakref.finalize(y, freed.append, "y")
    out = compiled(lambda y: y.sin())(y)
    gc.disable()
    try:
        del y
        del out
        assert freed == ["y"]
    finally:
        gc.enable()


def test_inputs_are_not_kept_by_the_compiled_function() -> None:
    call = compiled(lambda x: x + 1)
    freed: list[str] = []
    x = torch.randn(3)
    weakref.finalize(x, freed.append, "x")
    call(x)
    del x
    gc.collect()
    assert freed == ["x"]
