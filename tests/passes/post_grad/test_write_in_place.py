"""Operators that write: copies are spared where nobody else reads what was there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.ops.writes import written
from stator.passes.post_grad.write_in_place import write_in_place
from stator.patterns import fwd_only
from tests.parity import check


@pytest.fixture
def addresses() -> list[int]:
    """Where the operator wrote to."""
    return []


@pytest.fixture
def fill(addresses: list[int]) -> Iterator[Any]:
    """An operator that writes twice its second argument into the first, and says how much."""
    library = torch.library.Library("stator_test_writes", "DEF")
    library.define("fill(Tensor(a!) out, Tensor x) -> Tensor")

    def run(out: Tensor, x: Tensor) -> Tensor:
        addresses.append(out.data_ptr())
        out.copy_(2 * x)
        return x.sum()

    library.impl("fill", run, "CPU")
    torch.library.register_fake(
        "stator_test_writes::fill", lambda out, x: x.new_empty(()), lib=library
    )
    yield torch.ops.stator_test_writes.fill
    library._destroy()


def passed(program: Any, *inputs: Tensor, fuel: int | None = None) -> tuple[int, list[Any]]:
    """How many copies were spared, and which are left for each call."""
    module = fwd_only(program, inputs)
    spared = write_in_place(module.graph, Ctx(fuel=Fuel(fuel)))
    module.recompile()
    for ours, theirs in zip(module(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    calls = module.graph.find_nodes(op="call_function", target=written)
    return spared, [node.args[1] for node in calls]


def fresh(fill: Any, x: Tensor) -> list[Tensor]:
    out = torch.empty_like(x)
    total = fill(out, x)
    return [out + 1, total]


def test_what_is_made_for_the_call_is_not_copied(fill: Any) -> None:
    assert passed(lambda x: fresh(fill, x), torch.randn(4)) == (1, [[]])


def test_without_fuel_nothing_changes(fill: Any) -> None:
    assert passed(lambda x: fresh(fill, x), torch.randn(4), fuel=0) == (0, [])


def test_what_others_read_is_copied(fill: Any) -> None:
    def read_before(x: Tensor) -> list[Tensor]:
        out = x.sin()
        old = out.exp()
        fill(out, x)
        return [out, old]

    def read_by_the_call(x: Tensor) -> list[Tensor]:
        out = x.sin()
        fill(out, out.clone())
        return [out]

    def a_view(x: Tensor) -> list[Tensor]:
        out = x.sin()
        fill(out[:2], x[:2])
        return [out]

    def an_input(x: Tensor) -> list[Tensor]:
        fill(x, x + 1)
        return [x * 1]

    x = torch.randn(4)
    assert passed(read_before, x)[0] == 0
    assert passed(read_by_the_call, x)[0] in (0, 1)
    assert passed(a_view, x)[0] in (0, 1)
    module = fwd_only(an_input, [x.clone()])
    assert write_in_place(module.graph, Ctx()) == 0


def test_compiled_it_writes_where_the_value_lies(fill: Any, addresses: list[int]) -> None:
    x = torch.randn(64)
    compiled = stator.compile(lambda x: fresh(fill, x), strict=True)
    for _ in range(3):
        for ours, theirs in zip(compiled(x), fresh(fill, x), strict=True):
            torch.testing.assert_close(ours, theirs)
    check(lambda x: fresh(fill, x), x)
    assert len(addresses) >= 6


def test_several_in_a_row_keep_their_order(fill: Any) -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b = torch.empty_like(x), torch.empty_like(x)
        fill(a, x)
        fill(b, a)
        fill(a, b)
        return [a + b, b]

    x = torch.randn(8)
    spared, _ = passed(program, x)
    assert spared >= 1
    check(program, x)
