"""Sizes that change: found out by Dynamo, or marked by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from stator.aot.trace import refuse_guessed_sizes
from stator.errors import Unsupported
from tests.parity import check, compiled


def at_each(fn: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Call once with each input; a tuple is several arguments."""
    return [fn(*given) if isinstance(given, tuple) else fn(given) for given in inputs]


def graphs() -> int:
    """How many graphs Dynamo has handed over since the last compilation began."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def marked(tensor: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


# Automatic


def test_a_size_that_changes_once_is_compiled_for_every_size_after() -> None:
    check(lambda x: x.sin() * 2, *(leaf(n, 3) for n in (4, 5, 6, 7)), use=at_each)
    assert graphs() == 2


def test_two_sizes_that_change_are_compiled_for_every_pair_after() -> None:
    sizes = [(2, 3), (4, 5), (6, 7), (3, 9)]
    check(lambda x: (x @ x.t()).relu(), *(leaf(*size) for size in sizes), use=at_each)
    assert graphs() == 2


def test_sizes_that_stay_give_one_graph() -> None:
    check(lambda x: x.sin() * 2, leaf(4, 3), leaf(4, 3), use=at_each)
    assert graphs() == 1


def test_sizes_zero_and_one_are_right_after_others() -> None:
    check(lambda x: x.sum(0) + x, *(leaf(n, 3) for n in (4, 5, 1, 0, 6)), use=at_each)


def test_sequence_lengths_change_under_a_model() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    check(layer, *(torch.randn(2, n, 8) for n in (3, 5, 6)), use=at_each)


def test_batch_sizes_change_under_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check(model, *(torch.randn(n, 3, 8, 8) for n in (2, 3, 4)), use=at_each)


def test_image_sizes_change_under_a_convolution() -> None:
    model = nn.Conv2d(1, 2, 3, stride=2, padding=1)
    check(model, *(torch.randn(1, 1, n, n + 1) for n in (8, 9, 11)), use=at_each)


def test_an_integer_argument_that_changes_becomes_symbolic() -> None:
    x = leaf(8)
    check(lambda x, n: x[:n] * n, (x, 2), (x, 3), (x, 5), use=at_each)


def test_a_float_argument_that_changes_is_right() -> None:
    x = leaf(4)
    check(lambda x, f: x * f + f, (x, 0.5), (x, 1.5), (x, 2.5), use=at_each)


# All of them


def test_all_sizes_symbolic_from_the_start_give_one_graph() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * x.shape[0]

    check(fn, *(leaf(n, 3) for n in (4, 5, 6)), use=at_each, dynamic=True)
    assert graphs() == 1


def test_sizes_come_out_as_integers() -> None:
    def fn(x: Tensor) -> tuple[int, int, Tensor]:
        return x.shape[0], x.shape[0] * x.shape[1] + 1, x + 1

    check(fn, *(leaf(n, 3) for n in (4, 5)), use=at_each, dynamic=True)


def test_sizes_shape_new_tensors() -> None:
    def fn(x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[0], dtype=x.dtype)
        return x * steps[:, None] + torch.ones(x.shape[0], 1) + x.new_zeros(x.shape[1])

    check(fn, *(leaf(n, 3) for n in (4, 5)), use=at_each, dynamic=True)


def test_views_reshape_by_symbolic_sizes() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, m = x.shape
        return x.view(n * m), x.t().reshape(m, n, 1), x.unsqueeze(0).expand(2, n, m)

    check(fn, *(leaf(n, 3) for n in (4, 5)), use=at_each, dynamic=True)


def test_slices_and_concatenation_by_symbolic_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return torch.cat([x[half:], y, x[:half]]).cumsum(0)

    check(fn, (leaf(4), leaf(2)), (leaf(7), leaf(5)), use=at_each, dynamic=True)


def test_a_mutated_input_of_symbolic_size_is_written() -> None:
    def fn(x: Tensor) -> Tensor:
        x[1:].mul_(x.shape[0])
        return x.sum()

    check(fn, *(torch.randn(n) for n in (4, 5)), use=at_each, dynamic=True)


def test_a_mutated_input_of_symbolic_size_keeps_its_history() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x * 2

    pairs = [(torch.randn(n), leaf(n)) for n in (4, 5)]
    check(fn, *pairs, use=at_each, dynamic=True)


def test_aliased_outputs_of_symbolic_size_share() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return x[1:], y, y.t()

    check(fn, *(leaf(n, 3) for n in (4, 5)), use=at_each, dynamic=True)


def test_outputs_keep_their_strides_at_every_size() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() * 2, x.to(torch.float64)

    transposed = [torch.randn(3, n).t().requires_grad_() for n in (4, 5)]
    check(fn, leaf(4, 3), *transposed, leaf(6, 3), use=at_each, dynamic=True)


def test_a_size_needed_only_in_backward_is_saved() -> None:
    check(
        lambda x: x.expand(6, x.shape[1]).mean(0),
        *(leaf(1, n) for n in (4, 5, 6)),
        use=at_each,
        dynamic=True,
    )


def test_forwards_of_two_sizes_before_their_backwards() -> None:
    call = compiled(lambda x: (x * x.shape[0]).sin(), dynamic=True)
    x, y = leaf(3), leaf(5)
    first, second = call(x), call(y)
    second.sum().backward()
    first.sum().backward()
    assert torch.allclose(x.grad, 3 * (3 * x.detach()).cos())
    assert torch.allclose(y.grad, 5 * (5 * y.detach()).cos())


def test_double_backward_at_symbolic_sizes() -> None:
    def use(fn: Callable[..., Any], *inputs: Tensor) -> Any:
        return [
            torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0] * x.shape[0] for x in inputs
        ]

    check(lambda x: (x**3).cumsum(0), *(leaf(n) for n in (3, 4)), use=use, dynamic=True)


def test_a_choice_by_size_is_made_again_for_the_other_side() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x - 1

    check(fn, *(leaf(n) for n in (3, 4, 8, 9)), use=at_each, dynamic=True)
    assert graphs() == 2


def test_checkpoints_at_symbolic_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(
            lambda y: y.sin().exp() * y.shape[0], x, use_reentrant=False
        )
        return out

    # Of seven numbers, eager's happen to be off by a tenth of an ulp.
    check(fn, *(leaf(n) for n in (3, 4)), use=at_each, dynamic=True, tolerance_scale=4.0)


def test_attention_at_symbolic_sizes() -> None:
    def fn(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    pairs = [(leaf(1, 2, n, 8), leaf(1, 2, n, 8)) for n in (3, 5)]
    check(fn, *pairs, use=at_each, dynamic=True)


# Marked


def test_a_marked_size_gives_one_graph() -> None:
    inputs = [marked(leaf(n, 3), 0) for n in (4, 5, 6)]
    check(lambda x: x.sin() @ x.t(), *inputs, use=at_each)
    assert graphs() == 1


def test_a_size_marked_with_bounds_gives_one_graph() -> None:
    inputs = [leaf(n, 3) for n in (4, 5, 16)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    check(lambda x: x.softmax(0), *inputs, use=at_each)
    assert graphs() == 1


def test_a_marked_size_that_the_function_fixes_is_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.ones(4)

    with pytest.raises(ConstraintViolationError, match="dynamic"):
        compiled(fn)(marked(torch.randn(4), 0))


def test_a_size_marked_static_gives_a_graph_each() -> None:
    inputs = [leaf(n, 3) for n in (4, 5, 6)]
    for x in inputs:
        torch._dynamo.mark_static(x, 0)
    check(lambda x: x.sin() * 2, *inputs, use=at_each)
    assert graphs() == 3


def test_a_size_marked_unbacked_serves_zero_and_one_too() -> None:
    inputs = [leaf(n, 3) for n in (4, 1, 0, 6)]
    for x in inputs:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    check(lambda x: x.sin() * 2, *inputs, use=at_each)
    assert graphs() == 1


# Sizes that depend on data


@pytest.fixture
def data_dependent() -> Iterator[None]:
    """Let Dynamo capture results whose size or value depends on data."""
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        yield


@pytest.mark.usefixtures("data_dependent")
def test_nonzero_gives_as_many_as_there_are() -> None:
    check(
        lambda x: x.nonzero() * 2,
        torch.tensor([1, 0, 2]),
        torch.tensor([0, 0, 2]),
        torch.tensor([0, 0, 0]),
        use=at_each,
        fullgraph=True,
    )
    assert graphs() == 1


@pytest.mark.usefixtures("data_dependent")
def test_a_masked_selection_trains() -> None:
    def fn(x: Tensor) -> Tensor:
        return x[x > 0].sin() * 2

    check(fn, leaf(5), leaf(5), use=at_each, fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
def test_a_number_read_from_a_tensor_scales_the_result() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return x * n.item()

    pairs = [(leaf(3), torch.tensor(v)) for v in (2, 5)]
    check(fn, *pairs, use=at_each, fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
def test_a_number_read_from_a_tensor_sets_a_size() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 0)
        torch._check(size <= 8)
        return x.sum() + torch.ones(size)

    pairs = [(leaf(3), torch.tensor(v)) for v in (2, 5)]
    check(fn, *pairs, use=at_each, fullgraph=True)


@pytest.mark.usefixtures("data_dependent")
def test_a_failed_check_on_a_number_raises_as_eager_does() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size <= 3)
        return x * size

    check(fn, leaf(3), torch.tensor(5), fullgraph=True)


def test_a_size_that_torch_guesses_is_not_believed() -> None:
    """Some versions run an operator without a rule on zeros: of these one is unique."""
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten._unique.default, (graph.placeholder("x"),))
    node.meta["val"] = (torch.empty(1), torch.empty(0))

    with pytest.raises(Unsupported, match="sizes depend on values"):
        refuse_guessed_sizes(graph)
