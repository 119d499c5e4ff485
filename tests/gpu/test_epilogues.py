"""Products in one kernel with what follows them: wherever that may be, as if it were quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import stator
from stator.codegen.triton.product import product_shapes
from stator.codegen.triton.shape import Shape
from stator.core.events import last_compilation
from stator.runtime import products
from tests.gpu.on_device import OPTIONS, WHERE, compiled, needs_card, randn

BF16: Final = torch.bfloat16

pytestmark = pytest.mark.skipif(WHERE == "cpu", reason="a CPU's kernels are no products")


class Never:
    """Verdicts that are not asked."""

    def find(self, question: Any) -> None:
        raise AssertionError("nothing is measured")

    keep = find


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the products that join; all do, in the smallest shape."""
    names: list[str] = []

    def always(trial: Any, *_: Any) -> Shape:
        names.append(trial.call.name)
        return product_shapes(trial.joined.kernel)[-1]

    monkeypatch.setattr(products, "chosen", always)
    monkeypatch.setattr("stator.pipeline.verdicts_of", lambda _: Never())
    monkeypatch.setattr("stator.lower.target.Target.on_gpu", True)
    monkeypatch.setattr("stator.runtime.loading.Code.tuned", lambda self, *_: dict(self.settled))
    return names


def check(fn: Callable[..., Any], *inputs: Tensor) -> None:
    """Against float64, at most a little worse than eager."""
    torch._dynamo.reset()
    found = compiled(fn, tune=True, cache=False)(*inputs)
    eager, exact = fn(*inputs), fn(*(x.double() for x in inputs))
    for ours, theirs, right in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (found, eager, exact)), strict=True
    ):
        assert ours.dtype == theirs.dtype
        limit = 2 * (theirs.double() - right).abs().max() + 1e-3
        assert (ours.double() - right).abs().max() <= limit


def given(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight as linear has it, a bias."""
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / k**0.5, randn(n, dtype=dtype)


ACTIVATIONS: Final = (functional.gelu, functional.relu, functional.silu)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_layer_with_its_activation(act: Any, dtype: torch.dtype, joined: list[str]) -> None:
    check(lambda x, w, b: act(functional.linear(x, w, b)), *given(70, 90, 50, dtype))

    assert joined == ["addmm"]


def test_without_a_bias_and_with_a_residual(joined: list[str]) -> None:
    x, w, _ = given(64, 64, 64)

    check(lambda x, w: torch.tanh(x @ w.t()) + x, x, w)

    assert joined == ["mm"]


def test_of_three_dimensions_and_a_cast(joined: list[str]) -> None:
    _, w, b = given(70, 33, 40)
    x = randn(2, 35, 40, dtype=BF16)

    check(
        lambda x, w, b: functional.relu(functional.linear(x, w, b)).to(torch.float32) * 2, x, w, b
    )

    assert joined == ["addmm"]


def test_what_others_read_is_stored_as_well(joined: list[str]) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = functional.linear(x, w, b)
        z = functional.gelu(y)
        return y, z, y @ y.t()

    check(fn, *given(40, 70, 32))

    assert joined == ["addmm"]


def test_of_two_products_one_joins(joined: list[str]) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return functional.silu(x @ w) * (x @ v)

    check(fn, *(randn(48, 48, dtype=BF16) / 4 for _ in range(3)))

    assert len(joined) == 1


def test_products_that_meet_join_where_all_is_there(joined: list[str]) -> None:
    """Each may move to the other's place, but not both."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y, z = x @ w, x @ v
        a, b = torch.relu(y) + z, torch.tanh(z) * y
        return a, b, a @ b, z @ w

    check(fn, *(randn(32, 32, dtype=BF16) / 4 for _ in range(3)))

    assert joined


def test_layers_behind_each_other(joined: list[str]) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        for _ in range(3):
            x = functional.gelu(functional.linear(x, w, b)) + x
        return x

    check(fn, *given(33, 48, 48))

    assert len(joined) == 3


def test_a_step_of_training(joined: list[str]) -> None:
    def gradients(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = functional.gelu(functional.linear(x, w, b))
        return tuple(torch.autograd.grad(y.sum(), (x, w, b)))

    x, w, b = (tensor.requires_grad_() for tensor in given(40, 56, 32))
    torch._dynamo.reset()
    fn = compiled(
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)), tune=True, cache=False
    )

    found = torch.autograd.grad(fn(x, w, b).sum(), (x, w, b))

    exact = gradients(*(t.detach().double().requires_grad_() for t in (x, w, b)))
    eager = gradients(x, w, b)
    assert "addmm" in joined
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        limit = 2 * (theirs.double() - right).abs().max() + 1e-2
        assert (ours.double() - right).abs().max() <= limit


REFUSED: Final[dict[str, tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "half precision": (
        lambda x, w: torch.relu(x @ w),
        lambda: (randn(32, 32), randn(32, 32)),
    ),
    "scales": (
        lambda x, w: torch.relu(torch.addmm(x, x, w, beta=2)),
        lambda: (randn(32, 32, dtype=BF16), randn(32, 32, dtype=BF16)),
    ),
    "shorter": (
        lambda x, w: torch.relu(x @ w),
        lambda: (randn(32, 8, dtype=BF16), randn(8, 32, dtype=BF16)),
    ),
    "another row": (
        lambda x, w: (x @ w).flip(0) * 2 + (x @ w),
        lambda: (randn(32, 32, dtype=BF16), randn(32, 32, dtype=BF16)),
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_others_stay_with_the_library_and_it_is_said_why(reason: str, joined: list[str]) -> None:
    fn, make = REFUSED[reason]
    inputs = make()
    torch._dynamo.reset()

    told = stator.explain(fn, *inputs, options={**OPTIONS, "tune": True})

    assert joined == []
    assert "stays with cuBLAS" in str(told)
    assert reason in str(told)


def test_what_writes_to_an_operand_is_not_passed_by(joined: list[str]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        x.mul_(2)
        return torch.relu(y) + x

    x, w = (randn(32, 32, dtype=BF16) for _ in range(2))
    ours, theirs = x.clone(), x.clone()
    torch._dynamo.reset()

    found = compiled(fn, tune=True, cache=False)(ours, w)

    torch.testing.assert_close(found, fn(theirs, w), atol=0.1, rtol=0.02)
    torch.testing.assert_close(ours, theirs)


def test_each_is_checked_beside_eager_where_that_is_asked_for(joined: list[str]) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.relu(functional.linear(x, w, b)) + 1

    x, w, b = given(32, 48, 64)
    torch._dynamo.reset()

    found = compiled(fn, tune=True, cache=False, verify="kernels")(x, w, b)

    torch.testing.assert_close(found, fn(x, w, b))
    assert joined == ["addmm"]


def test_without_a_card_nothing_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    if WHERE == "cuda":
        pytest.skip("there is one")
    x, w, b = given(32, 32, 32)
    torch._dynamo.reset()
    told = stator.explain(
        lambda x, w, b: functional.relu(functional.linear(x, w, b)),
        *(x, w, b),
        options={**OPTIONS, "tune": True},
    )

    assert "addmm" in str(told)
    assert "cuBLAS" not in str(told)


@needs_card
def test_it_is_measured_beside_the_library() -> None:
    x, w, b = given(2048, 2048, 1024)
    torch._dynamo.reset()

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.gelu(functional.linear(x, w, b))

    found = compiled(fn, "max-autotune-no-cudagraphs", cache=False, profile_ranges=True)(x, w, b)

    exact = fn(*(t.double() for t in (x, w, b)))
    assert (found.double() - exact).abs().max() < 0.05
    record = last_compilation()
    assert record is not None
    assert any("by cuBLAS and a kernel" in note for note in record.notes), record.notes


@needs_card
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("size", [(512, 768, 256), (300, 520, 136), (257, 129, 70)])
def test_every_shape_is_right_on_the_card(
    size: tuple[int, int, int], number: int, joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nth(trial: Any, *_: Any) -> Shape:
        shapes = product_shapes(trial.joined.kernel)
        joined.append(trial.call.name)
        return shapes[number % len(shapes)]

    monkeypatch.setattr(products, "chosen", nth)

    check(lambda x, w, b: functional.gelu(functional.linear(x, w, b)) + 1, *given(*size))

    assert joined
