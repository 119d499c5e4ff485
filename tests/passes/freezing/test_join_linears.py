"""Products of one input that become one, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.passes.freezing.fold_binary import fold_binary
from stator.passes.freezing.join_linears import FEW_ROWS, join_linears
from stator.passes.post_grad.share_subexpressions import share_subexpressions
from stator.pipeline import FREEZING
from tests.passes.freezing.accuracy import folded
from tests.passes.freezing.graphs import rewritten, run_with_constants, with_weights

aten = torch.ops.aten
PASSES = (share_subexpressions, join_linears)
SEEDED = torch.Generator().manual_seed(0)
X = torch.randn(2, 5, 8, generator=SEEDED)
WEIGHTS = (
    torch.randn(8, 8, generator=SEEDED),
    torch.randn(8, 8, generator=SEEDED),
    torch.randn(8, 8, generator=SEEDED),
)
BIASES = (
    torch.randn(8, generator=SEEDED),
    torch.randn(8, generator=SEEDED),
    torch.randn(8, generator=SEEDED),
)


def heads(y: Tensor) -> Tensor:
    return y.view(2, 5, 2, 4).transpose(1, 2)


def attention(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = (heads(F.linear(x, one)) for one in (u, v, w))
    return F.scaled_dot_product_attention(q, k, v)


def attention_by_hand(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = (heads(F.linear(x, one)) for one in (u, v, w))
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def gated(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(x, u)) * F.linear(x, v)


def lying_otherwise(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ u).relu() + (x @ v.t()).relu()


def of_other_widths(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ u[:, :3]).relu().sum(-1) + (x @ v[:, :5]).relu().sum(-1) + (x @ w).tanh().sum(-1)


def products(calls: list[str]) -> int:
    return sum(call in ("aten.mm.default", "aten.addmm.default") for call in calls)


@pytest.mark.parametrize(
    "fn", [attention, attention_by_hand, gated, lying_otherwise, of_other_widths]
)
def test_products_of_one_input_are_joined(fn: Callable[..., Tensor]) -> None:
    calls, notes = folded(fn, (X, *WEIGHTS), *PASSES)

    assert products(calls) == 1
    assert any("are joined" in note for note in notes)


def test_each_product_may_have_a_view_of_its_own() -> None:
    calls, _ = folded(attention, (X, *WEIGHTS), join_linears)
    assert products(calls) == 1


def test_each_product_may_have_a_cast_of_its_own() -> None:
    """As under autocast."""

    def gated_in_half(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        first, second = (F.linear(x.bfloat16(), one.bfloat16()) for one in (u, v))
        return F.silu(first) * second

    calls, _ = folded(gated_in_half, (X, *WEIGHTS), *FREEZING)
    assert products(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_joined(dtype: torch.dtype) -> None:
    given = tuple(one.to(dtype) for one in (X, *WEIGHTS))
    calls, _ = folded(gated, given, *PASSES)
    assert products(calls) == 1


def test_biases_are_joined_with_their_like() -> None:
    def fn(x: Tensor, *rest: Tensor) -> Tensor:
        u, v, w, a, b, _ = rest
        first, second = F.linear(x, u, a), F.linear(x, v, b)
        third, fourth = F.linear(x, w), F.linear(x, w + u)
        return first.relu() * second + third.relu() * fourth

    calls, notes = folded(fn, (X, *WEIGHTS, *BIASES), *PASSES)
    assert sorted(call for call in calls if "mm" in call) == [
        "aten.addmm.default",
        "aten.mm.default",
    ]
    assert sorted(notes) == ["addmm, addmm_1 are joined", "mm, mm_1 are joined"]


def test_what_was_folded_is_joined() -> None:
    def fn(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return (F.linear(x, u) * 0.5).relu() + (F.linear(x, v) * 3).relu()

    calls, _ = folded(fn, (X, *WEIGHTS), share_subexpressions, fold_binary, join_linears)
    assert [call for call in calls if "view" not in call] == [
        "aten.mm.default",
        "aten.slice.Tensor",
        "aten.slice.Tensor",
        "aten.relu.default",
        "aten.relu.default",
        "aten.add.Tensor",
    ]


@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS])
def test_few_rows_are_joined(rows: int) -> None:
    calls, _ = folded(gated, (torch.randn(rows, 8), *WEIGHTS), *PASSES)
    assert products(calls) == 1


@pytest.mark.parametrize("fn", [attention, attention_by_hand, gated, of_other_widths])
def test_nodes_know_how_their_values_lie(fn: Callable[..., Tensor]) -> None:
    module, _ = rewritten(fn, (X, *WEIGHTS), (1, 2, 3), *PASSES)

    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(X, *WEIGHTS)
    for node, value in interpreter.env.items():
        noted = node.meta.get("val")
        if isinstance(noted, Tensor):
            assert (value.size(), value.stride()) == (noted.size(), noted.stride()), node.name


def test_weights_that_lie_by_columns_still_do() -> None:
    module, _ = rewritten(gated, (X, *WEIGHTS), (1, 2, 3), *PASSES)
    (product,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    weight = product.args[1]

    assert isinstance(weight, fx.Node)
    assert weight.meta["val"].stride() == (1, 8)


# --- what is not joined ---


def returned(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x[0] @ u, (x[0] @ v).relu()


def multiplied_again(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return ((x @ u) @ w).relu() + (x @ v).relu()


def viewed_as_one_row(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x[0] @ u).view(-1).relu() + (x[0] @ v).relu().view(-1)


def with_odd_biases(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(u[:1], x[0], v).relu() + torch.addmm(u[:5], x[0], w).relu()


@pytest.mark.parametrize(
    ("fn", "weights", "reasons"),
    [
        (gated, (1, 3), ["mm_1 not joined: the weight of mm_1 is no constant"]),
        (returned, (1, 2, 3), ["the caller gets a part"]),
        (multiplied_again, (1, 2, 3), ["mm_1 gets a part"]),
        (viewed_as_one_row, (1, 2, 3), ["has to be in one piece"]),
        (with_odd_biases, (1, 2, 3), ["addmm not joined", "addmm_1 not joined"]),
    ],
)
def test_what_is_not_joined_says_why(
    fn: Callable[..., Any], weights: tuple[int, ...], reasons: list[str]
) -> None:
    graph = with_weights(fn, (X, *WEIGHTS), weights).graph
    share_subexpressions(graph, Ctx())
    before, ctx = str(graph), Ctx()

    assert join_linears(graph, ctx) == 0
    assert str(graph) == before
    assert len(ctx.record.notes) == len(reasons)
    for reason, noted in zip(reasons, ctx.record.notes, strict=True):
        assert reason in noted


def test_an_input_that_is_written_in_between_is_not_read_earlier() -> None:
    graph = with_weights(gated, (X[0], *WEIGHTS), (1, 2, 3)).graph
    first, _ = graph.find_nodes(op="call_function", target=aten.mm.default)
    with graph.inserting_after(first):
        graph.call_function(aten.copy_.default, (first.args[0], first.args[0]))
    ctx = Ctx()

    assert join_linears(graph, ctx) == 0
    assert ctx.record.notes == ["mm, mm_1 not joined: copy__default writes in between"]


def test_many_rows_are_not_joined() -> None:
    _, ctx = rewritten(gated, (torch.randn(FEW_ROWS + 1, 8), *WEIGHTS), (1, 2, 3), *PASSES)
    assert "no faster" in ctx.record.notes[0]


def test_a_large_weight_that_others_read_is_not_held_twice() -> None:
    def fn(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return (F.linear(x, u).relu() + F.linear(x, v).relu()).sum() + u[0, 0] * x.sum()

    given = (torch.randn(4, 1024), torch.randn(512, 1024), torch.randn(512, 1024))
    _, ctx = rewritten(fn, given, (1, 2), *PASSES)
    assert "which is large, too" in ctx.record.notes[0]


def test_products_of_different_inputs_are_no_group() -> None:
    def fn(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        other = x.view(2, 4, 10) @ torch.cat([v, w[:2]])
        return (x @ u).relu() + (x.sin() @ v).relu() + other.sum()

    _, ctx = rewritten(fn, (X, *WEIGHTS), (1, 2, 3), *PASSES)
    assert ctx.record.notes == []


def test_without_fuel_the_graph_is_unchanged() -> None:
    graph = with_weights(gated, (X[0], *WEIGHTS), (1, 2, 3)).graph
    before, ctx = str(graph), Ctx(fuel=Fuel(left=0))

    assert join_linears(graph, ctx) == 0
    assert str(graph) == before
    assert ctx.record.notes == ["mm, mm_1 not joined: there is no fuel left"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_part(bad: float) -> None:
    given = (X.abs() + 0.1, *(one.clone() for one in WEIGHTS))
    given[1][3, 0] = bad
    module, _ = rewritten(gated, given, (1, 2, 3), *PASSES)
    (found,), _ = run_with_constants(module, given)

    torch.testing.assert_close(found, gated(*given), equal_nan=True)
