"""Writing to inputs, parameters and buffers: data, version, history."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import check, compiled


def test_a_mutated_input_holds_the_new_values() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    check(fn, torch.randn(3))


def test_a_mutated_input_that_is_not_read_again_holds_the_new_values() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return y * 2

    check(fn, torch.randn(3), torch.randn(3))


def test_only_the_last_of_two_mutations_is_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        before = x.clone()
        x.add_(1)
        middle = x * before
        x.mul_(3)
        return middle + x

    check(fn, torch.randn(3))


def test_a_function_may_mutate_and_return_nothing() -> None:
    def fn(x: Tensor) -> None:
        x.cos_()

    check(fn, torch.randn(3))


def test_a_mutated_input_may_be_returned() -> None:
    check(lambda x: x.add_(1), torch.randn(3))


def test_several_inputs_are_mutated_in_one_call() -> None:
    def fn(xs: list[Tensor], y: Tensor) -> Tensor:
        for x in xs:
            x.sub_(y)
        y.exp_()
        return y.sum()

    check(fn, [torch.randn(3), torch.randn(3)], torch.randn(3))


def test_a_swap_through_copies_swaps() -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    check(fn, torch.randn(3), torch.randn(3))


def test_writing_through_a_view_writes_to_the_input() -> None:
    def fn(x: Tensor) -> Tensor:
        x[1:].t()[0].fill_(5)
        return x.sum()

    check(fn, torch.randn(3, 4))


def test_writing_through_a_chain_of_views_leaves_the_rest_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        part = x.view(2, 6)[:, ::2]
        part.transpose(0, 1)[1].mul_(10)
        return part + 1

    check(fn, torch.randn(3, 4))


def test_a_mutated_input_of_other_strides_keeps_them() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    check(fn, torch.randn(4, 3).t())
    check(fn, torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    check(fn, torch.randn(8)[::2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_inputs_of_any_dtype_are_mutated(dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        x[0].fill_(1)
        return x.clone()

    check(fn, torch.zeros(2, 3, dtype=dtype))


def test_a_result_is_cast_to_the_dtype_of_the_input_written() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x * 3

    check(fn, torch.zeros(3, dtype=torch.int64), torch.tensor([1.9, -2.2, 0.4]))


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i, v: x.index_put_((i,), v),
        lambda x, i, v: x.index_copy_(0, i, v),
        lambda x, i, v: x.index_add_(0, i, v),
        lambda x, i, v: x.scatter_(0, i[:, None].expand_as(v), v),
        lambda x, i, v: x.masked_fill_(x > 0, 2.0),
        lambda x, i, v: x.index_fill_(0, i, -1.0),
        lambda x, i, v: x.__setitem__(i, v),
        lambda x, i, v: x.__setitem__((slice(None), 1), v[:, 0].sum()),
    ],
    ids=[
        "index_put",
        "index_copy",
        "index_add",
        "scatter",
        "masked_fill",
        "index_fill",
        "[]",
        "[:]",
    ],
)
def test_indexed_writes_reach_the_input(write: Callable[..., Any]) -> None:
    def fn(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        write(x, index, values)
        return x.sum(0)

    check(fn, torch.randn(4, 3), torch.tensor([2, 0]), torch.randn(2, 3))


def test_out_arguments_are_written() -> None:
    def fn(x: Tensor, out: Tensor) -> Tensor:
        torch.sin(x, out=out)
        return out * 2

    check(fn, torch.randn(3), torch.empty(3))


def test_foreach_writes_to_every_input() -> None:
    def fn(xs: list[Tensor], ys: list[Tensor]) -> None:
        torch._foreach_mul_(xs, 2.0)
        torch._foreach_add_(xs, ys)

    check(fn, [torch.randn(2), torch.randn(3)], [torch.randn(2), torch.randn(3)])


# Autograd


def test_gradients_flow_through_a_mutated_input() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x.sin()

    check(fn, torch.randn(3), torch.randn(3, requires_grad=True))


def test_an_input_gains_history_when_something_with_history_is_written_to_it() -> None:
    def fn(x: Tensor, w: Tensor) -> None:
        x.add_(w * 2)

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    compiled(fn)(x, w)
    assert x.requires_grad
    x.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))
    check(fn, torch.randn(3), torch.randn(3, requires_grad=True))


def test_an_input_with_history_is_mutated_and_its_source_gets_the_gradient() -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(3)
        return x * x

    check(fn, torch.randn(3, requires_grad=True) * 1)


def test_an_input_with_history_that_is_overwritten_gets_no_gradient() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x * 2

    check(fn, torch.randn(3, requires_grad=True) * 1, torch.randn(3, requires_grad=True))


def test_writing_to_part_of_an_input_with_history_keeps_the_gradient_of_the_rest() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x[0].copy_(y)
        return x * 2

    check(fn, torch.randn(2, 3, requires_grad=True) * 1, torch.randn(3, requires_grad=True))


def test_writing_to_a_leaf_that_requires_grad_raises_as_eager_does() -> None:
    check(lambda x: x.mul_(2), torch.randn(3, requires_grad=True), expect_graph=False)


def test_a_view_with_history_is_mutated_and_its_base_sees_it() -> None:
    def fn(view: Tensor, base: Tensor) -> Tensor:
        view.mul_(2)
        return view.sum() + base.sum()

    base = torch.randn(2, 3, requires_grad=True) * 1
    check(fn, base[0], base)


def test_mutation_without_grad_of_a_leaf_that_requires_it_is_allowed() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * 3

    check(fn, torch.randn(3, requires_grad=True))


def test_mutation_through_detach_bumps_the_version_and_keeps_the_leaf() -> None:
    def fn(x: Tensor) -> Tensor:
        x.detach().mul_(2)
        return x * 3

    check(fn, torch.randn(3, requires_grad=True))


def test_mutation_through_data_is_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x * 3

    check(fn, torch.randn(3, requires_grad=True))


def test_a_mutation_under_no_grad_keeps_the_history_of_the_input() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.add_(1)
        return x.exp()

    check(fn, torch.randn(3, requires_grad=True) * 1)


def test_a_mutated_input_outside_the_graph_of_gradients_stays_without_history() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.add_(1)
        return x * w

    check(fn, torch.randn(3), torch.randn(3, requires_grad=True))


def test_a_mutated_integer_beside_training_stays_without_history() -> None:
    def fn(count: Tensor, w: Tensor) -> Tensor:
        count.add_(1)
        return w * count

    check(fn, torch.tensor(4), torch.randn(3, requires_grad=True), calls=2)


def test_saving_a_value_that_is_then_overwritten_raises_in_backward_as_eager_does() -> None:
    def fn(w: Tensor) -> Tensor:
        a = w * 1
        b = a.sin()
        a.mul_(2)
        return b

    def train(call: Callable[..., Any]) -> None:
        call(torch.randn(3, requires_grad=True)).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(fn)
    # nothing to compile here: the joint graph of such a program does not exist
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(compiled(fn, options={"strict": False}))


def test_grad_mode_decides_whether_a_mutation_is_recorded() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x + 1

    with torch.no_grad():
        check(fn, torch.randn(3), torch.randn(3, requires_grad=True))
    with torch.inference_mode():
        check(fn, torch.randn(3), torch.randn(3))


# Modules


def test_batch_norm_updates_its_statistics_every_call() -> None:
    check(nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True), calls=3)


def test_batch_norm_in_eval_leaves_its_statistics_alone() -> None:
    check(nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4, requires_grad=True), calls=2)


class Counter(nn.Module):
    """Counts its calls and keeps a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += x.detach()
        return x * self.scale * self.calls


def test_buffers_accumulate_over_calls() -> None:
    check(Counter(), torch.randn(3), calls=3)


class KeyCache(nn.Module):
    """Writes each call's keys at a position, as a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 3))

    def forward(self, new: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(1, position, new)
        return self.keys.sum(1)


def test_a_cache_buffer_is_filled_in_place() -> None:
    module = KeyCache()
    pointer = module.keys.data_ptr()
    fn = compiled(module)
    for step in range(3):
        fn(torch.full((2, 1, 3), step + 1.0), torch.tensor([step]))
    assert module.keys.data_ptr() == pointer
    assert module.keys[0, :, 0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    check(KeyCache(), torch.randn(2, 1, 3), torch.tensor([5]))


def test_a_buffer_replaced_by_a_new_tensor_is_replaced() -> None:
    class Replace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state: Tensor
            self.register_buffer("state", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.state * 0.9 + x
            return self.state + 1

    check(Replace(), torch.randn(3), calls=3)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_optimizer_step_updates_the_parameters(
    kind: Callable[..., torch.optim.Optimizer], foreach: bool
) -> None:
    def train(use: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
        step = use(optimizer.step)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            step()
        return [parameter.detach() for parameter in model.parameters()]

    for ours, eager in zip(train(compiled), train(lambda step: step), strict=True):
        torch.testing.assert_close(ours, eager)


# Storage and metadata


def test_assigning_data_gives_the_input_another_storage() -> None:
    def fn(x: Tensor) -> Tensor:
        x.data = torch.ones(4)
        return x + 1

    check(fn, torch.randn(3))


def test_assigning_data_of_a_leaf_that_requires_grad_keeps_it_a_leaf() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.data = y * 2
        return x * x

    check(fn, torch.randn(3, requires_grad=True), torch.randn(3))


def test_a_storage_that_was_freed_is_allocated_and_filled() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.untyped_storage().resize_(12)
            x.copy_(y)
        return x + 1

    x = torch.randn(3)
    x.untyped_storage().resize_(0)
    assert compiled(fn, fullgraph=True)(x, torch.ones(3)).tolist() == [2, 2, 2]
    assert x.untyped_storage().nbytes() == 12
    assert x.tolist() == [1, 1, 1]


def test_metadata_mutations_of_intermediates_shape_the_output() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        y.t_()
        y.unsqueeze_(0)
        return y * 2

    check(fn, torch.randn(2, 3, requires_grad=True))


def test_metadata_mutation_of_an_input_beside_a_graph_break_is_kept() -> None:
    def fn(x: Tensor) -> Tensor:
        x.t_()
        return x * 2

    check(fn, torch.randn(2, 3))


def test_an_intermediate_may_be_mutated_freely() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y[0] = 1
        y[:, 1].mul_(3)
        y += x
        return y.sin_()

    check(fn, torch.randn(3, 4, requires_grad=True))


@pytest.mark.filterwarnings("ignore")  # that such a graph was left to eager
def test_writing_to_overlapping_memory_raises_as_eager_does() -> None:
    check(lambda x: x.add_(1), torch.randn(3).expand(2, 3), options={"strict": False})
