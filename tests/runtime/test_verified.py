"""Kernels beside eager: right ones pass, a wrong one is named with its line and worst element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stator
from stator.errors import WrongResult
from stator.loops.build import Body
from stator.loops.ir import Expr
from stator.ops import table
from stator.ops.table import Pointwise, Promotion
from stator.runtime.verified import Watch

OPTIONS = {"verify": "kernels", "strict": True}
aten = torch.ops.aten


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    found: Callable[..., Any] = torch.compile(
        function, backend="stator", options={**OPTIONS, **options}
    )
    return found


@pytest.fixture(name="counts")
def _counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each call of a graph compared, so far."""
    found: list[int] = []
    end = Watch.end

    def counting(self: Watch) -> None:
        found.append(self.compared)
        end(self)

    monkeypatch.setattr(Watch, "end", counting)
    return found


def sines(x: Tensor) -> Tensor:
    y = (x * 2).sin()
    return y.sum(-1)


def wrong_in(place: int) -> Callable[[Body, Expr], Expr]:
    """A sine that is off where its argument is large."""

    def body(b: Body, x: Expr) -> Expr:
        return b.where(b.gt(x, place), b.const(0.5, x), b.sin(x))

    return body


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Pointwise(aten.sin.default, wrong_in(5), Promotion.RESULT)
    monkeypatch.setitem(table.POINTWISE, aten.sin.default, broken)
    run = compiled(lambda x: (x * 2).sin() + 1)
    x = torch.zeros(3, 4)
    assert torch.equal(run(x), torch.ones(3, 4))

    x[1, 2] = 3.0
    with pytest.raises(WrongResult) as caught:
        run(x)
    told = str(caught.value)
    assert "kernel_0" in told
    assert "[1, 2]: 1.5, eager 0.72" in told
    assert "aten.mul.Tensor, aten.sin.default, aten.add.Tensor" in told
    assert "test_verified.py:" in told
    assert "stator bisect" in told


def test_a_part_of_an_operator_is_compared_with_who_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Pointwise(aten.sin.default, wrong_in(5), Promotion.RESULT)
    monkeypatch.setitem(table.POINTWISE, aten.sin.default, broken)
    with pytest.raises(WrongResult, match="sum"):
        compiled(sines)(torch.full((2, 3), 4.0))


class Layers(nn.Module):
    """Gathers, scatters, norms, random numbers, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 16)
        self.norm = nn.LayerNorm(16)
        self.batch = nn.BatchNorm1d(16)

    def forward(self, i: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.words(i)))
        x = self.batch(x.transpose(1, 2)).transpose(1, 2)
        x = F.dropout(x, 0.25) + 0.1 * torch.randn_like(x) + torch.rand_like(x)
        return F.cross_entropy(torch.cat([x, x.cumsum(1)], -1).flatten(0, 1), i.flatten())


def test_right_kernels_pass(counts: list[int]) -> None:
    torch.manual_seed(0)
    layers = Layers()
    i = torch.randint(0, 10, (4, 12))
    run = compiled(layers)
    for _ in range(2):
        run(i).backward()

    forward, backward, *later = counts
    assert forward > 4
    assert backward > 2
    assert later == [2 * forward, 2 * backward]


def test_what_a_kernel_stores_over_was_copied(counts: list[int]) -> None:
    weights = [torch.randn(20, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn(20)
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    twins = [weight.detach().clone().requires_grad_() for weight in weights]
    for twin, weight in zip(twins, weights, strict=True):
        twin.grad = weight.grad
    torch.optim.AdamW(twins, lr=0.1).step()

    compiled(optimizer.step)()

    torch.testing.assert_close(weights, twins)
    assert counts[-1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_symbolic_sizes_and_other_types(dtype: torch.dtype, counts: list[int]) -> None:
    def several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.softmax(x * 2, -1).sum(0), (x * y).tanh().var(1), x.argmax(1), x > y

    torch._dynamo.reset()
    run = torch.compile(several, backend="stator", dynamic=True, options=OPTIONS)
    for rows in (5, 9):
        x, y = torch.randn(2, rows, 33).to(dtype)
        run(x, y)
    assert counts[-1] >= 8


def test_nothing_is_kept_for_other_processes(tmp_path: Any) -> None:
    cached = {"cache": True, "cache_dir": tmp_path}
    x = torch.randn(5)
    for _ in range(2):
        compiled(torch.exp, **cached)(x)
    record = stator.last_compilation()
    assert record is not None
    assert record.cache != "hit"
    assert any("beside eager" in note for note in record.notes)


def test_memory_that_nobody_filled_is_not_compared() -> None:
    assert compiled(lambda x: torch.empty_like(x))(torch.randn(4)).shape == (4,)
