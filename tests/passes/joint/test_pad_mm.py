"""Products with wider rows: where the model says so, with a reason either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.graph.verify import verify
from stator.passes.joint.pad_mm import Product, pad_mm, why_not_padded
from tests.parity import check
from tests.rules.tracing import targets, traced


def shallow(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def rand(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def test_a_shallow_product_is_widened() -> None:
    inputs = rand(1024, 16), rand(16, 301)
    module = traced(shallow, *inputs)
    ctx = Ctx()

    assert pad_mm(module.graph, ctx) == 1
    verify(module.graph, after="pad_mm")
    module.recompile()
    assert targets(module) == [
        "aten.constant_pad_nd.default",
        "aten.mm.default",
        "aten.slice.Tensor",
        "aten.clone.default",
        "aten.relu.default",
    ]
    assert ctx.record.notes == ["mm is padded to 304 columns"]
    torch.testing.assert_close(module(*inputs), shallow(*inputs))


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (Product(1, 4096, 16, 1001, 4), None),
        (Product(1, 4096, 16, 1024, 4), "aligned"),
        (Product(1, 4096, 16, 1001, 8), None),
        (Product(1, 4096, 1024, 1001, 4), "depth"),
        (Product(1, 64, 4, 1001, 4), "small"),
        (Product(1, 400, 128, 4001, 4), "few"),
    ],
)
def test_both_verdicts_have_a_reason(product: Product, reason: str | None) -> None:
    found = why_not_padded(product)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: x @ w,  # the caller wants it in one piece
        lambda x, w: (x @ w) @ w.t(),  # so does a product
        lambda x, w: (x @ w).sum(),
    ],
)
def test_where_others_read_it_it_stays(program: Any) -> None:
    module = traced(program, rand(1024, 16), rand(16, 301))
    before = str(module.graph)

    assert pad_mm(module.graph, Ctx()) == 0
    assert str(module.graph) == before


def test_without_fuel_nothing_changes() -> None:
    module = traced(shallow, rand(1024, 16), rand(16, 301))
    assert pad_mm(module.graph, Ctx(fuel=Fuel(0))) == 0


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (shallow, (rand(1024, 16), rand(16, 301))),
        (
            lambda x, w, b: torch.addmm(b, x, w).sigmoid(),
            (rand(1024, 16), rand(16, 301), rand(301)),
        ),
        (  # its gradient is many sums: of a single one, eager's error may be nought by luck
            lambda x, w, b: torch.addmm(b, x, w).sigmoid(),
            (rand(1024, 16), rand(16, 301), rand(1024, 1)),
        ),
        (lambda x, w: torch.bmm(x, w).exp(), (rand(3, 512, 16), rand(3, 16, 301))),
        (lambda x, w: (x @ w.t()).view(32, 32, 301) + 1, (rand(1024, 16), rand(301, 16))),
    ],
)
def test_widened_programs_compute_the_same(program: Any, inputs: tuple[Tensor, ...]) -> None:
    check(program, *inputs)
    check(program, *(x.requires_grad_() for x in inputs))
