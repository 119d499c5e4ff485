"""Inputs that are one tensor, or share storage with each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check, compiled


def read(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y.sin()


def write_first(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def write_second(x: Tensor, y: Tensor) -> Tensor:
    y.mul_(2)
    return x + y


def write_both(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    y.add_(1)
    return x + y


WRITES = [write_first, write_second, write_both]


def test_one_tensor_given_twice_is_read_twice() -> None:
    x = torch.randn(3)
    check(read, x, x)


def test_one_leaf_given_twice_gets_the_sum_of_both_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    check(read, x, x)


def test_one_leaf_given_twice_in_a_list_gets_the_sum() -> None:
    x = torch.randn(3, requires_grad=True)
    check(lambda xs: xs[0] * xs[1] + xs[2], [x, torch.randn(3), x])


@pytest.mark.parametrize("fn", WRITES)
def test_one_tensor_given_twice_is_written_once_for_both(fn: Any) -> None:
    x = torch.randn(3)
    check(fn, x, x)


@pytest.mark.parametrize("fn", WRITES)
def test_one_tensor_with_history_given_twice_is_written_for_both(fn: Any) -> None:
    x = torch.randn(3, requires_grad=True) * 1
    check(fn, x, x)


@pytest.mark.parametrize("fn", WRITES)
def test_a_tensor_and_a_view_of_all_of_it_see_each_others_writes(fn: Any) -> None:
    x = torch.randn(3)
    check(fn, x, x.view(3))


@pytest.mark.parametrize("fn", WRITES)
def test_a_square_and_its_transpose_see_each_others_writes(fn: Any) -> None:
    x = torch.randn(3, 3)
    check(fn, x, x.t())


@pytest.mark.parametrize("fn", WRITES)
def test_overlapping_slices_see_each_others_writes(fn: Any) -> None:
    x = torch.randn(5)
    check(fn, x[:3], x[2:])


@pytest.mark.parametrize("fn", WRITES)
def test_neighbouring_slices_do_not_see_each_others_writes(fn: Any) -> None:
    x = torch.randn(6)
    check(fn, x[:3], x[3:])


@pytest.mark.parametrize("fn", WRITES)
def test_interleaved_slices_do_not_see_each_others_writes(fn: Any) -> None:
    x = torch.randn(6)
    check(fn, x[::2], x[1::2])


@pytest.mark.parametrize("fn", WRITES)
def test_overlapping_views_of_a_base_with_history_give_right_gradients(fn: Any) -> None:
    x = torch.randn(5, requires_grad=True) * 1
    check(fn, x[:3], x[2:])


def test_a_base_and_its_view_with_history_give_right_gradients() -> None:
    def fn(base: Tensor, view: Tensor) -> Tensor:
        view.mul_(3)
        return base * 2

    x = torch.randn(2, 3, requires_grad=True) * 1
    check(fn, x, x[0])


def test_views_that_require_grad_are_only_read() -> None:
    x = torch.randn(5, requires_grad=True)
    check(read, x[:3], x[2:])


def test_a_detached_twin_sees_the_write() -> None:
    x = torch.randn(3)
    check(write_first, x, x.detach())


def test_the_rows_of_one_matrix_may_all_be_written() -> None:
    def fn(rows: tuple[Tensor, ...], whole: Tensor) -> Tensor:
        for index, row in enumerate(rows):
            row.mul_(index + 1)
        return whole.sum(0)

    x = torch.randn(3, 4)
    check(fn, (x[0], x[1], x[2]), x)


def test_three_overlapping_views_are_written_in_order() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        c.sub_(3)
        return a + b + c

    x = torch.randn(6)
    check(fn, x[:4], x[1:5], x[2:])


def test_a_write_and_views_of_both_inputs_come_back() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x[:2], y.view(-1)

    x = torch.randn(6)
    check(fn, x[:4], x[2:])


def test_an_expanded_input_beside_its_source_sees_the_write() -> None:
    def fn(source: Tensor, wide: Tensor) -> Tensor:
        source.mul_(2)
        return wide + 1

    x = torch.randn(3)
    check(fn, x, x.expand(2, 3))


@pytest.mark.filterwarnings("ignore")  # that such a graph was left to eager
def test_one_storage_seen_as_two_dtypes_sees_the_write() -> None:
    def fn(x: Tensor, bits: Tensor) -> Tensor:
        x.mul_(2)
        return bits + 1

    x = torch.randn(3)
    check(fn, x, x.view(torch.int32), options={"strict": False})


def test_two_storages_beside_a_shared_one_are_kept_apart() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        a.mul_(2)
        c.add_(1)
        return a + b + c + d

    x, y = torch.randn(4), torch.randn(4)
    check(fn, x[:3], x[1:], y[:3], y[1:])


def test_tied_weights_get_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).relu())

    check(Tied(), torch.tensor([[1, 2, 4]]))


def test_a_buffer_that_views_another_sees_its_update() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("head", self.whole[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.whole += x
            return self.head * 2

    module, x = Shared(), torch.arange(4.0)
    call = compiled(module)
    assert call(x).tolist() == [0, 2]
    assert call(x).tolist() == [0, 4]
    assert module.head.tolist() == [0, 2]


def test_a_function_compiled_for_separate_inputs_is_right_for_one_given_twice() -> None:
    call, x = compiled(write_first), torch.ones(3)
    call(torch.ones(3), torch.ones(3))
    assert call(x, x).tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]


def test_a_function_compiled_for_one_given_twice_is_right_for_separate_inputs() -> None:
    call, x = compiled(write_first), torch.ones(3)
    call(x, x)
    assert call(torch.ones(3), torch.ones(3)).tolist() == [3, 3, 3]


def test_a_function_compiled_for_separate_inputs_is_right_for_overlapping_ones() -> None:
    call, x = compiled(write_first), torch.ones(5)
    call(torch.ones(3), torch.ones(3))
    assert call(x[:3], x[2:]).tolist() == [4, 3, 3]
    assert x.tolist() == [2, 2, 2, 1, 1]


def test_a_function_compiled_for_overlapping_inputs_is_right_for_separate_ones() -> None:
    call, x = compiled(write_first), torch.ones(5)
    assert call(x[:3], x[2:]).tolist() == [4, 3, 3]
    assert call(torch.ones(3), torch.ones(3)).tolist() == [3, 3, 3]
