"""Saved values that the backward stores over: only where nobody else will read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stator.aot.function as function
from stator.torch_api import is_sole
from tests.parity import check


@pytest.fixture(params=["native", "python"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether values that would be stored over were nobody else's, in the order of asking."""
    found: list[bool] = []

    def watched(values: list[Any], place: int) -> bool:
        found.append(is_sole(values, place))
        return found[-1]

    monkeypatch.setattr(function, "is_sole", watched)
    return found


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Logits are saved, and their gradient is as large as they are."""
    return F.cross_entropy(x @ w, target)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(64, 32), torch.randn(32, 200)
    return x.requires_grad_(), w.requires_grad_(), torch.randint(200, (64,))


def compiled(program: Any, executor: str) -> Any:
    return torch.compile(program, backend="stator", options={"executor": executor, "strict": True})


def gradients(program: Any, x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.autograd.grad(program(x, w, target), (x, w))
    return found


def test_a_gradient_lies_where_the_saved_value_was(executor: str, asked: list[bool]) -> None:
    given = inputs()
    found = gradients(compiled(loss, executor), *given)
    torch.testing.assert_close(found, gradients(loss, *given))
    assert asked == [True]


def test_a_graph_that_is_kept_gives_the_same_again(executor: str, asked: list[bool]) -> None:
    x, w, target = inputs()
    result = compiled(loss, executor)(x, w, target)
    runs = [torch.autograd.grad(result, (x, w), retain_graph=True) for _ in range(3)]
    runs.append(torch.autograd.grad(result, (x, w)))
    for run in runs:
        torch.testing.assert_close(run, gradients(loss, x, w, target))
    assert asked == [True]  # the last one alone may take them


def test_what_a_hook_holds_stays_as_it_is(executor: str, asked: list[bool]) -> None:
    given, held = inputs(), list[Tensor]()

    def pack(value: Tensor) -> int:
        held.append(value)
        return len(held) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, held.__getitem__):
        result = compiled(loss, executor)(*given)
    before = [value.clone() for value in held]
    found = torch.autograd.grad(result, given[:2])
    torch.testing.assert_close(found, gradients(loss, *given))
    assert all(map(torch.equal, held, before))
    assert asked == [False]


def test_a_view_of_it_that_somebody_has_stays_as_it_is(executor: str) -> None:
    given, views = inputs(), list[Tensor]()

    def pack(value: Tensor) -> Tensor:
        views.append(value.detach().view(-1)[:1])
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = compiled(loss, executor)(*given)
    before = [view.clone() for view in views]
    torch.autograd.grad(result, given[:2])
    assert all(map(torch.equal, views, before))


def test_what_comes_back_laid_otherwise_is_laid_as_planned(executor: str) -> None:
    given = inputs()

    def unpack(value: Tensor) -> Tensor:
        return value.t().contiguous().t() if value.dim() == 2 else value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        result = compiled(loss, executor)(*given)
    found = torch.autograd.grad(result, given[:2])
    torch.testing.assert_close(found, gradients(loss, *given))


def test_checkpointed_programs_keep_what_is_theirs() -> None:
    def twice(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        step = torch.compile(loss, backend="stator")
        return checkpoint(step, x, w, target, use_reentrant=False) + step(x.sin(), w, target)

    given = inputs()
    torch.testing.assert_close(
        gradients(twice, *given),
        gradients(lambda x, w, target: loss(x, w, target) + loss(x.sin(), w, target), *given),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_saved_values_that_share_memory(dynamic: bool) -> None:
    def program(x: Tensor) -> Tensor:
        y = x.sin()
        return (y.sigmoid() * y.t().exp()).tanh() @ y.tanh()

    check(program, torch.randn(40, 40, requires_grad=True), dynamic=dynamic)


def test_an_output_that_is_saved_too_is_the_callers() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).sigmoid()
        return y, y.exp().sum()

    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 200, requires_grad=True)
    y, total = torch.compile(program, backend="stator")(x, w)
    before = y.detach().clone()
    total.backward()
    assert torch.equal(y.detach(), before)
