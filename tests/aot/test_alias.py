"""Outputs that share storage with inputs, with intermediates, with each other."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check, compiled

Pair = namedtuple("Pair", ["first", "second"])

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[1:],
    "row": lambda x: x[0],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(12),
    "reshape": lambda x: x.reshape(2, 6),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x[:, :1].expand(3, 5),
    "diagonal": lambda x: x.diagonal(),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 1),
    "select": lambda x: x.select(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "movedim": lambda x: x.movedim(0, 1),
    "view_as": lambda x: x.view_as(torch.empty(4, 3)),
    "chain": lambda x: x.t()[1:].unsqueeze(0).transpose(1, 2)[..., 0],
    "step": lambda x: x[::2, 1::2],
    "chunk": lambda x: x.chunk(2, 1),
    "split": lambda x: x.split([1, 2]),
    "unbind": lambda x: x.unbind(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_input_shares_its_storage(name: str) -> None:
    view = VIEWS[name]

    def fn(x: Tensor) -> Any:
        return view(x), x.sin()

    check(fn, torch.randn(3, 4))
    check(fn, torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_intermediate_is_as_in_eager(name: str) -> None:
    view = VIEWS[name]
    check(lambda x: view(x * 2), torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("name", ["slice", "transpose", "chunk", "expand"])
def test_a_view_beside_its_intermediate_base_shares_with_it(name: str) -> None:
    view = VIEWS[name]

    def fn(x: Tensor) -> Any:
        base = x * 2
        return base, view(base)

    check(fn, torch.randn(3, 4, requires_grad=True))


# Identity


def test_an_input_returned_is_the_same_object() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1

    check(fn, torch.randn(3))
    check(fn, torch.randn(3, requires_grad=True))


def test_one_result_returned_twice_is_one_object() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    check(fn, torch.randn(3, requires_grad=True))


def test_one_view_returned_twice_is_one_object() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x[0]
        return y, y, x * 2

    check(fn, torch.randn(2, 3, requires_grad=True))


def test_contiguous_of_a_contiguous_input_is_the_input() -> None:
    check(lambda x: (x.contiguous(), x + 1), torch.randn(3))


def test_contiguous_of_another_layout_is_a_copy() -> None:
    check(lambda x: (x.contiguous(), x + 1), torch.randn(3, 2).t())


def test_a_cast_to_the_same_dtype_is_the_input() -> None:
    check(lambda x: (x.to(torch.float32), x + 1), torch.randn(3))


def test_reshape_copies_where_eager_has_to() -> None:
    check(lambda x: (x.reshape(-1), x + 1), torch.randn(3, 2).t().requires_grad_())


def test_a_parameter_returned_is_the_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x @ self.weight, self.weight, self.weight.t()

    check(Tied(), torch.randn(2, 3))


# Several aliases


def test_two_views_of_one_input_share() -> None:
    check(lambda x: (x[0], x[1:], x.t(), x * 2), torch.randn(3, 4, requires_grad=True))


def test_two_views_of_one_intermediate_share() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x.sin()
        return base.t(), base[1:]

    check(fn, torch.randn(3, 4, requires_grad=True))


def test_a_view_of_an_input_and_one_of_an_intermediate_do_not_share() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1), (x * 1).view(-1)

    check(fn, torch.randn(3, 4, requires_grad=True))


def test_an_output_beside_its_detached_self_shares_without_history() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.detach()

    check(fn, torch.randn(3, requires_grad=True))


def test_a_detached_input_shares_without_history() -> None:
    check(lambda x: (x.detach(), x * 2), torch.randn(3, requires_grad=True))


def test_a_detached_view_of_an_input_shares_without_history() -> None:
    check(lambda x: (x[0].detach(), x * 2), torch.randn(2, 3, requires_grad=True))


def test_aliases_inside_containers_are_kept() -> None:
    def fn(x: Tensor) -> dict[str, Any]:
        y = x * 2
        return {"pair": Pair(y, y[0]), "list": [x, (x.t(),)], "none": None, "number": 3}

    check(fn, torch.randn(2, 3, requires_grad=True))


def test_aliases_of_parameters_keep_their_gradient() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.table[1:3], x @ self.table

    check(Rows(), torch.randn(2, 4))


def test_a_view_of_an_output_that_needs_no_grad_beside_one_that_does() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = y + 1
        return a, a[0], x * 2

    check(fn, torch.randn(3, requires_grad=True), torch.randn(2, 3))


def test_an_empty_view_is_an_alias_too() -> None:
    check(lambda x: (x[:0], x + 1), torch.randn(3, 2, requires_grad=True))


# Views with another dtype


def test_real_and_imaginary_parts_share_with_the_complex_input() -> None:
    check(lambda z: (z.real, z.imag, z * 2), torch.randn(3, dtype=torch.complex64))
    check(lambda z: (torch.view_as_real(z), z * 2), torch.randn(3, dtype=torch.complex64))


def test_a_complex_view_of_a_real_input_shares() -> None:
    check(lambda x: (torch.view_as_complex(x), x * 2), torch.randn(3, 2, requires_grad=True))


def test_a_conjugate_output_keeps_its_lazy_bit() -> None:
    check(lambda z: (z.conj(), z * 2), torch.randn(3, dtype=torch.complex64, requires_grad=True))


def test_bits_seen_as_another_dtype_share() -> None:
    check(lambda x: (x.view(torch.int32), x * 2), torch.randn(3))


# Aliases of what was written


def test_a_view_of_a_mutated_input_shares_with_it() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x[0], x.t()

    check(fn, torch.randn(2, 3))


def test_a_view_taken_before_the_mutation_sees_it() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        row = x[0]
        x.mul_(2)
        return row, row + 1

    check(fn, torch.randn(2, 3))


def test_a_view_of_a_mutated_intermediate_sees_it() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        row = y[0]
        y.mul_(2)
        row.add_(1)
        return row, y

    check(fn, torch.randn(2, 3, requires_grad=True))


def test_a_mutated_input_with_history_and_a_view_of_it_come_back() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x, x[0]

    check(fn, torch.randn(2, 3, requires_grad=True) * 1)


# What is done to outputs afterwards


def write_to_first(fn: Callable[..., Any], *inputs: Any) -> Any:
    outs = fn(*inputs)
    outs[0].mul_(3)
    return outs


def test_writing_to_an_aliased_output_reaches_the_input() -> None:
    check(lambda x: (x[0], x + 1), torch.randn(2, 3), use=write_to_first)


def test_writing_to_an_aliased_output_with_history_reaches_the_gradient() -> None:
    check(lambda x: (x[0], x + 1), torch.randn(2, 3, requires_grad=True) * 1, use=write_to_first)


def test_writing_to_an_output_reaches_the_view_beside_it() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[0]

    check(fn, torch.randn(2, 3, requires_grad=True), use=write_to_first)


def test_writing_to_a_view_of_an_intermediate_reaches_its_sibling() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y.view(-1), y.t()

    check(fn, torch.randn(2, 3, requires_grad=True), use=write_to_first)


def test_writing_to_one_of_several_chunks_raises_as_eager_does() -> None:
    check(lambda x: (x * 2).chunk(2), torch.randn(4, requires_grad=True), use=write_to_first)


def test_writing_to_an_output_that_shares_nothing_changes_nothing_else() -> None:
    check(lambda x: (x * 2, x * 3), torch.randn(2, 3, requires_grad=True), use=write_to_first)


def test_an_output_that_is_a_leaf_input_cannot_be_written_as_in_eager() -> None:
    check(lambda x: (x, x * 3), torch.randn(2, 3, requires_grad=True), use=write_to_first)


def test_outputs_of_two_calls_do_not_share() -> None:
    fn = compiled(lambda x: x + 1)
    first, second = fn(torch.zeros(3)), fn(torch.ones(3))
    assert first.tolist() == [1, 1, 1]
    assert first.data_ptr() != second.data_ptr()


def test_a_result_stays_when_a_later_call_mutates_the_input() -> None:
    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 1

    call, x = compiled(fn), torch.zeros(2)
    first = call(x)
    call(x)
    assert first.tolist() == [1, 1]
    assert x.tolist() == [2, 2]


# Functions of the user's own


class ViewWithGrad(torch.autograd.Function):
    """A view whose gradient the user wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(2, 3) * 5


def test_a_view_made_by_a_function_of_the_user_keeps_the_gradient_written_for_it() -> None:
    check(lambda x: ViewWithGrad.apply(x * 1) * 2, torch.randn(2, 3, requires_grad=True))


def test_aliasing_under_no_grad_has_no_history() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            row = x[0]
        return row, x * 2

    check(fn, torch.randn(2, 3, requires_grad=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_under_modes_without_grad_share_as_in_eager(mode: Callable[[], Any]) -> None:
    with mode():
        check(lambda x: (x[0], x.t(), x + 1), torch.randn(2, 3))
