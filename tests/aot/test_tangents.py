"""What comes in from above in backward: any layout, absent, or of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "scalar": lambda: torch.randn(()).expand(3, 4),
    "strided": lambda: torch.randn(6, 8)[::2, ::2],
    "offset": lambda: torch.randn(5, 4)[2:],
    "contiguous": lambda: torch.randn(3, 4),
}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def pull(fn: Callable[..., Any], x: Tensor, tangent: Tensor) -> None:
    """Send a given tangent back; the layout of a gradient follows it and is not promised."""
    fn(x).backward(tangent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tangent_of_any_layout_gives_the_same_gradient(layout: str) -> None:
    check(lambda x: x.sin() * x, leaf(3, 4), LAYOUTS[layout](), use=pull)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tangent_of_any_layout_reaches_a_reduction_and_a_view(layout: str) -> None:
    check(lambda x: (x.cumsum(0) * x.sum(0)).view(3, 4), leaf(3, 4), LAYOUTS[layout](), use=pull)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tangent_of_any_layout_reaches_a_transposed_output(layout: str) -> None:
    check(lambda x: x.t() * 2, leaf(4, 3), LAYOUTS[layout](), use=pull)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tangent_of_any_layout_at_symbolic_sizes(layout: str) -> None:
    check(lambda x: (x.sin() * x).relu(), leaf(3, 4), LAYOUTS[layout](), use=pull, dynamic=True)


def test_calls_of_one_function_get_tangents_of_different_layouts() -> None:
    def use(fn: Callable[..., Any], x: Tensor, *tangents: Tensor) -> Any:
        for tangent in tangents:
            fn(x).backward(tangent)

    check(lambda x: (x @ x.t()) @ x, leaf(3, 4), *(make() for make in LAYOUTS.values()), use=use)


@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("planned", [torch.contiguous_format, torch.channels_last])
def test_image_layouts_of_output_and_tangent_may_differ(
    planned: torch.memory_format, given: torch.memory_format
) -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=planned).requires_grad_()
    tangent = torch.randn(2, 5, 4, 4).to(memory_format=given)

    check(nn.Conv2d(3, 5, 3, padding=1), x, tangent, use=pull)


def test_the_gradient_of_a_sum_is_an_expanded_one() -> None:
    check(lambda x: x.sin(), leaf(3, 4), use=lambda fn, x: fn(x).sum())


# Absent


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * 2, y.cos() * 2


def test_an_input_reached_only_through_an_unused_output_gets_none() -> None:
    check(two, leaf(3), leaf(3), use=lambda fn, x, y: fn(x, y)[0])
    check(two, leaf(3), leaf(3), use=lambda fn, x, y: fn(x, y)[1])


def test_a_parameter_reached_only_through_an_unused_output_gets_none() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).relu()
            return self.left(hidden), self.right(hidden)

    check(Heads(), torch.randn(2, 3), use=lambda fn, x: fn(x)[1])


def test_an_input_reached_through_both_outputs_gets_its_part() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x.sin()

    check(fn, leaf(3), leaf(3), use=lambda fn, x, y: fn(x, y)[1])


def test_a_zero_tangent_is_not_an_absent_one() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        first, second = fn(x, y)
        return first + second * 0

    check(two, leaf(3), leaf(3), use=use)


def test_all_eight_choices_of_three_outputs_give_gradients_as_eager_does() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * y, y.sin() * z, z.exp()

    for chosen in range(1, 8):
        check(
            fn,
            *(leaf(3) for _ in "xyz"),
            use=lambda fn, *args, chosen=chosen: [
                out for index, out in enumerate(fn(*args)) if chosen >> index & 1
            ],
        )


def test_an_unused_output_that_aliases_a_used_one() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.view(-1)

    check(fn, leaf(2, 3), use=lambda fn, x: fn(x)[0])
    check(fn, leaf(2, 3), use=lambda fn, x: fn(x)[1])


def test_an_unused_view_of_an_input_leaves_no_gradient() -> None:
    check(lambda x, y: (x[0], y * 2), leaf(2, 3), leaf(3), use=lambda fn, x, y: fn(x, y)[1])


def test_a_mutated_input_that_is_not_used_afterwards_needs_no_tangent() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        x.mul_(w)
        return v * 2

    check(fn, torch.randn(3), leaf(3), leaf(3), use=lambda fn, *args: fn(*args))


# Of another kind


def test_a_tangent_that_requires_grad_is_differentiated_too() -> None:
    def use(fn: Callable[..., Any], x: Tensor, tangent: Tensor) -> Any:
        return torch.autograd.grad(fn(x), x, tangent, create_graph=True)

    check(lambda x: x.sin() * x, leaf(3), leaf(3), use=use)


def test_one_tensor_as_the_tangent_of_two_outputs() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor, tangent: Tensor) -> Any:
        torch.autograd.backward(fn(x, y), (tangent, tangent))

    check(two, leaf(3), leaf(3), torch.randn(3), use=use)


def test_an_output_given_twice_gets_both_tangents() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        out = fn(x)
        return [out * 2, out * 3]

    check(lambda x: x.sin(), leaf(3), use=use)


def test_a_tangent_of_the_wrong_shape_raises_as_eager_does() -> None:
    check(lambda x: x.sin() * x, leaf(3), torch.randn(4), use=pull)


def test_a_conjugated_tangent_is_resolved() -> None:
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    tangent = torch.randn(3, dtype=torch.complex64).conj()
    check(lambda z: z * z, z, tangent, use=pull)


def test_an_empty_tangent_goes_through() -> None:
    check(lambda x: x.sin() * 2, leaf(0, 3), torch.randn(0, 3), use=pull)


def test_a_tangent_is_not_written_to() -> None:
    check(lambda x: (x * 2).relu(), leaf(3), torch.randn(3), use=pull)


def test_a_gradient_that_is_the_tangent_itself_is_not_shared_with_the_leaf() -> None:
    def use(fn: Callable[..., Any], x: Tensor, tangent: Tensor) -> Any:
        fn(x).backward(tangent, retain_graph=True)
        x.grad.add_(1)

    check(lambda x: x + 1, leaf(3), torch.randn(3), use=use)


def test_two_inputs_with_one_gradient_do_not_share_it() -> None:
    def use(fn: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        fn(x, y).sum().backward()
        x.grad.add_(1)
        return y.grad.clone()

    check(lambda x, y: x + y, leaf(3), leaf(3), use=use)
