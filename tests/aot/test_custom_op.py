"""Operators of the user's own: called as they are, with their effects kept in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aot.custom_operators import (
    accumulate,
    min_and_max,
    no_gradient,
    note,
    notes,
    positive,
    scaled_sin,
    swap_and_sum,
    write_down,
)
from tests.parity import check, compiled


@pytest.fixture(autouse=True)
def _nothing_noted() -> Iterator[None]:
    notes.clear()
    yield
    notes.clear()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_custom_operator_runs_among_others() -> None:
    check(lambda x: scaled_sin(x * 2, 3.0) + 1, torch.randn(3), fullgraph=True)


def test_a_custom_operator_trains_by_its_own_backward() -> None:
    check(lambda x: scaled_sin(x * 2, 3.0) * x, leaf(3), fullgraph=True)


def test_double_backward_through_a_custom_operator() -> None:
    def use(fn: Callable[..., Any], x: Tensor) -> Any:
        return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    check(lambda x: scaled_sin(x, 3.0) * x, leaf(3), use=use)


@pytest.mark.filterwarnings("ignore")  # that such a graph was left to eager
def test_a_custom_operator_without_backward_fails_in_backward_as_eager_does() -> None:
    check(lambda x: no_gradient(x) * 2, leaf(3), fullgraph=True, options={"strict": False})


def test_a_custom_operator_without_backward_runs_in_inference() -> None:
    check(lambda x: no_gradient(x) * 2, torch.randn(3), fullgraph=True)


def test_a_custom_operator_takes_lists_and_optional_values() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (*min_and_max([x, y]), *min_and_max([x], cap=0.1))

    check(fn, torch.randn(3), torch.randn(4), fullgraph=True)


def test_a_custom_operator_mutates_an_input() -> None:
    def fn(total: Tensor, x: Tensor) -> Tensor:
        accumulate(total, x * 2)
        return total + 1

    check(fn, torch.randn(3), torch.randn(3), fullgraph=True, calls=2)


def test_a_custom_operator_mutates_an_intermediate() -> None:
    def fn(x: Tensor) -> Tensor:
        total = torch.zeros(3)
        accumulate(total, x)
        accumulate(total, x * 2)
        return total

    check(fn, torch.randn(3), fullgraph=True)


def test_a_custom_operator_mutates_through_a_view() -> None:
    def fn(whole: Tensor, x: Tensor) -> Tensor:
        accumulate(whole[1], x)
        return whole.sum(0)

    check(fn, torch.randn(2, 3), torch.randn(3), fullgraph=True)


def test_a_custom_operator_mutates_two_and_returns_a_third() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return swap_and_sum(a, b) + a

    check(fn, torch.randn(3), torch.randn(3), fullgraph=True)


def test_a_mutating_custom_operator_beside_training() -> None:
    def fn(total: Tensor, x: Tensor) -> Tensor:
        accumulate(total, x.detach())
        return x.sin() * total

    check(fn, torch.randn(3), leaf(3), fullgraph=True)


def test_a_custom_operator_whose_result_size_depends_on_data() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(
            lambda x: positive(x) * 2,
            torch.tensor([1.0, -1, 2]),
            torch.tensor([-1.0, -1, -2]),
            use=lambda fn, *inputs: [fn(x) for x in inputs],
            fullgraph=True,
        )


def test_effects_happen_in_the_order_written() -> None:
    def fn(x: Tensor) -> Tensor:
        first = note(x, "one")
        second = note(x * 2, "two")
        third = note(x, "three")
        return third + second + first

    compiled(fn, fullgraph=True)(torch.randn(3))
    assert notes == ["one", "two", "three"]


def test_an_effect_whose_result_is_not_used_still_happens() -> None:
    def fn(x: Tensor) -> Tensor:
        note(x, "unused")
        return x * 2

    compiled(fn, fullgraph=True)(torch.randn(3))
    assert notes == ["unused"]


def test_an_effect_without_result_happens() -> None:
    def fn(x: Tensor) -> Tensor:
        write_down("before", x)
        y = x * 2
        write_down("after", y)
        return y

    compiled(fn, fullgraph=True)(torch.ones(3))
    assert notes == ["before 3", "after 6"]


def test_an_effect_happens_on_every_call() -> None:
    call = compiled(lambda x: note(x, "again") * 2, fullgraph=True)
    for _ in range(3):
        call(torch.randn(3))
    assert notes == ["again"] * 3


def test_effects_of_backward_happen_in_backward() -> None:
    x = leaf(3)
    out = compiled(lambda x: note(note(x, "one") * 2, "two"), fullgraph=True)(x)
    assert notes == ["one", "two"]
    out.sum().backward()
    assert notes == ["one", "two", "two back", "one back"]
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_effects_sit_between_the_mutations_around_them() -> None:
    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        write_down("middle", x)
        x.add_(1)
        return x * 1

    compiled(fn, fullgraph=True)(torch.zeros(2))
    assert notes == ["middle 2"]


def test_torchs_own_print_is_an_effect(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: Tensor) -> Tensor:
        torch.ops.aten._print("first")
        y = x + 1
        torch.ops.aten._print("second")
        return y

    compiled(fn, fullgraph=True)(torch.randn(3))
    assert capfd.readouterr().out.split() == ["first", "second"]


def test_a_custom_operator_under_no_grad_has_no_history() -> None:
    with torch.no_grad():
        check(lambda x: scaled_sin(x, 2.0), leaf(3))


def test_a_custom_operator_at_symbolic_sizes() -> None:
    check(
        lambda x: scaled_sin(x, 2.0) * x.shape[0],
        *(leaf(n) for n in (3, 5)),
        use=lambda fn, *inputs: [fn(x) for x in inputs],
        dynamic=True,
    )
