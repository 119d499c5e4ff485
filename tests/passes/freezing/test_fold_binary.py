"""Arithmetic that becomes part of convolutions and products, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stator
from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.options import Options
from stator.passes.freezing.fold_batch_norm import fold_batch_norm
from stator.passes.freezing.fold_binary import fold_binary
from stator.passes.joint.drop_noops import drop_noops
from tests.passes.freezing.accuracy import folded, is_as_exact
from tests.passes.freezing.graphs import rewritten, run_with_constants, with_weights

CONVOLUTION = "aten.convolution.default"
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.squeeze.dim")

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda y, c: y + c,
    "add_left": lambda y, c: c + y,
    "add_alpha": lambda y, c: torch.add(y, c, alpha=3),
    "sub": lambda y, c: y - c,
    "sub_alpha": lambda y, c: torch.sub(y, c, alpha=0.5),
    "mul": lambda y, c: y * c,
    "mul_left": lambda y, c: c * y,
    "div": lambda y, c: y / c,
}
SEEDED = torch.Generator().manual_seed(0)
IMAGE = (
    torch.randn(2, 4, 8, 8, generator=SEEDED),
    torch.randn(6, 4, 3, 3, generator=SEEDED),
    torch.randn(6, generator=SEEDED),
)
ROWS = (
    torch.randn(2, 5, 8, generator=SEEDED),
    torch.randn(6, 8, generator=SEEDED),
    torch.randn(6, generator=SEEDED),
)
CHANNELS = torch.randn(6, generator=SEEDED) + 3


def convolution(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.conv2d(x, w, b)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.linear(x, w, b)


def without_views(calls: list[str]) -> list[str]:
    return [call for call in calls if call not in VIEWS]


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("number", [2, 0.3, -1.7])
def test_numbers_are_folded(name: str, biased: bool, number: float) -> None:
    def images(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ARITHMETIC[name](convolution(x, w, b if biased else None), number)

    def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ARITHMETIC[name](linear(x, w, b if biased else None), number)

    calls, _ = folded(images, IMAGE, fold_binary)
    assert calls == [CONVOLUTION]
    calls, _ = folded(rows, ROWS, fold_binary)
    assert len(without_views(calls)) == 1


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(6, 1, 1), (1, 6, 1, 1), (1, 1, 1), ()])
def test_constants_of_channels_are_folded_into_convolutions(
    name: str, biased: bool, shape: tuple[int, ...]
) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ARITHMETIC[name](convolution(x, w, b if biased else None), c.view(shape))

    constant = CHANNELS if 6 in shape else CHANNELS[:1]
    calls, _ = folded(fn, (*IMAGE, constant), fold_binary)
    assert calls == [CONVOLUTION]


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1, 6), (1,), ()])
def test_constants_of_columns_are_folded_into_products(
    name: str, biased: bool, shape: tuple[int, ...]
) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ARITHMETIC[name](linear(x, w, b if biased else None), c.view(shape))

    constant = CHANNELS if 6 in shape else CHANNELS[:1]
    calls, _ = folded(fn, (*ROWS, constant), fold_binary)
    assert len(without_views(calls)) == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_have_their_channels_elsewhere(groups: int) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, b, groups=groups) * c.view(-1, 1, 1)

    w = torch.randn(4, 6 // groups, 3, 3)
    calls, _ = folded(fn, (IMAGE[0], w, IMAGE[2], CHANNELS), fold_binary)
    assert calls == [CONVOLUTION]


def test_chains_are_folded_to_their_end_and_rounded_once() -> None:
    def chain(x: Tensor, w: Tensor, b: Tensor, c: Tensor, var: Tensor) -> Tensor:
        y = convolution(x, w, b) * c.view(-1, 1, 1)
        y = F.batch_norm(y, c, var) * 2 + c.view(1, -1, 1, 1)
        return F.batch_norm(y, c, var, c, c) / 3 - 1

    given = (*IMAGE, CHANNELS, CHANNELS.abs())
    calls, notes = folded(chain, given, fold_batch_norm, fold_binary)
    assert calls == [CONVOLUTION]
    assert sum("is folded" in note for note in notes) == 7

    module, _ = rewritten(chain, given, (1, 2, 3, 4), fold_binary)
    casts = module.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert sum(cast.meta["val"].dtype == torch.float32 for cast in casts) == 2


def test_batch_norms_stay_where_they_are_to_be_skipped() -> None:
    def chain(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.batch_norm(convolution(x, w, b) * 2, c, c.abs())

    graph = with_weights(chain, (*IMAGE, CHANNELS), (1, 2, 3)).graph
    ctx = Ctx(options=Options(skip=("fold_batch_norm",)))

    assert fold_binary(graph, ctx) == 1
    assert ctx.record.notes == ["mul is folded"]


def test_the_result_of_a_fold_that_comes_later_in_the_graph_is_there_in_time() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = convolution(x, w, b)
        return y * (c.exp() + c).view(-1, 1, 1)

    calls, _ = folded(fn, (*IMAGE, CHANNELS / 10), fold_binary)
    assert calls == [CONVOLUTION]


def squeezed(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return convolution(x[:1], w, b).squeeze(0) * c[:, None, None]


def flattened(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return convolution(x, w, b).flatten(2) + c[:, None]


def test_views_that_keep_channels_may_stand_between() -> None:
    for fn in (squeezed, flattened):
        calls, _ = folded(fn, (*IMAGE, CHANNELS), fold_binary)
        assert CONVOLUTION in calls
        assert not {"aten.mul.Tensor", "aten.add.Tensor"} & set(calls)


@torch.no_grad()
def test_views_of_sizes_that_vary_may_stand_between() -> None:
    """Such sizes are nodes of the graph, which a view reads beside its operand."""
    torch._dynamo.reset()
    weight, factor = nn.Parameter(torch.randn(6, 4).bfloat16()), nn.Parameter(torch.randn(6))

    def fn(x: Tensor) -> Tensor:
        return ((x @ weight.t()) * factor).flatten(0, 1).bfloat16()

    compiled = stator.compile(fn, freezing=True, dynamic=True, strict=True, cache=False)
    for batch in (2, 3):
        x = torch.randn(batch, 5, 4).bfloat16()
        assert is_as_exact(
            compiled(x), fn(x), (x.double() @ weight.t().double() * factor).flatten(0, 1)
        )
    record = stator.last_compilation()
    assert record is not None
    assert any(note.endswith("is folded") for note in record.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_16_bits_meet_a_constant_of_32_without_axes(name: str, dtype: torch.dtype) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ARITHMETIC[name](convolution(x, w, b), c)

    x, w, b = (one.to(dtype) for one in IMAGE)
    calls, _ = folded(fn, (x, w, b, torch.tensor(0.7)), fold_binary)
    may_leave_range = dtype is torch.float16 and name in ("mul", "mul_left", "div")
    assert (calls == [CONVOLUTION]) != may_leave_range


def test_16_bits_meet_16() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return linear(x, w, b) * c + c

    x, w, b, c = (one.bfloat16() for one in (*ROWS, CHANNELS))
    calls, _ = folded(fn, (x, w, b, c), fold_binary)
    assert without_views(calls) == ["aten.addmm.default"]


@pytest.mark.parametrize("is_cast_before", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda y, c: y * c,
        lambda y, c: y + c,
        lambda y, c: c + y * c,
        lambda y, c: (y / c).view(-1, 6) * 2 - c,
    ],
)
def test_arithmetic_of_more_digits_that_is_rounded_behind_is_folded(
    change: Callable[[Tensor, Tensor], Tensor], is_cast_before: bool
) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = linear(x, w, b)
        return change(y.to(c.dtype) if is_cast_before else y, c).to(x.dtype).relu()

    x, w, b = (one.bfloat16() for one in ROWS)
    calls, notes = folded(fn, (x, w, b, CHANNELS.abs() + 0.5), fold_binary, drop_noops)
    assert without_views(calls) == ["aten.addmm.default", "aten.relu.default"]
    assert not any("not folded" in note for note in notes)


def test_a_chain_of_factors_keeps_to_the_range_of_float16_as_a_whole() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear(x, w, b) * 8 * 8 * 8

    calls, notes = folded(fn, tuple(one.half() for one in ROWS), fold_binary)
    assert without_views(calls) == ["aten.addmm.default", *["aten.mul.Tensor"] * 2]
    assert "multiplied by 64 would lose digits" in notes[1]


def test_whole_numbers_are_constants_too() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return linear(x, w, b) * c.long()

    calls, _ = folded(fn, (*ROWS, CHANNELS), fold_binary)
    assert without_views(calls) == ["aten.addmm.default"]


def test_no_rows_have_arithmetic_too() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return linear(x, w, b) * c

    calls, _ = folded(fn, (torch.randn(0, 5, 8), *ROWS[1:], CHANNELS), fold_binary)
    assert without_views(calls) == ["aten.addmm.default"]


# --- what is not folded ---


def on_the_right(op: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b, c: op(c, linear(x, w, b))


def with_constant(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b, c: change(linear(x, w, b), c)


def with_wide(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b, c: change(linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float(), c)


def with_half(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda x, w, b, c: change(linear(x.half(), w.half(), b.half()), c.half())


def read_twice(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = linear(x, w, b)
    return y * c + y.relu()


def view_read_twice(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = linear(x, w, b).view(-1, 6)
    return y * c + y.relu()


def scaled(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(b, x[0], w.t(), alpha=2) * c


def split_columns(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return linear(x, w, b).view(10, 3, 2) * c[:2]


def deep_nothing(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return linear(x[..., :0], w[:, :0], b) / c


ALL = (1, 2, 3)


@pytest.mark.parametrize(
    ("fn", "weights", "reason"),
    [
        (on_the_right(torch.sub), ALL, "addmm is on the right of it"),
        (on_the_right(torch.div), ALL, "addmm is on the right of it"),
        (lambda x, w, b, c: 1 - linear(x, w, b), ALL, "addmm is on the right of it"),
        (with_constant(lambda y, c: y * c), (2, 3), "the weight of addmm is no constant"),
        (with_constant(lambda y, c: y * c), (1, 3), "the bias of addmm is no constant"),
        (with_constant(lambda y, c: y + c), (1, 3), "the bias of addmm is no constant"),
        (with_constant(lambda y, c: y * c.double()), ALL, "makes torch.float64"),
        (with_constant(lambda y, c: y.double() * c), ALL, "makes torch.float64"),
        (with_wide(lambda y, c: (y * c).exp().bfloat16()), ALL, "makes torch.float32"),
        (with_wide(lambda y, c: (y * c).bfloat16() + y), ALL, "others read _to_copy_3, too"),
        (with_wide(lambda y, c: (y * c - y.new_ones(5, 1)).bfloat16()), ALL, "others read"),
        (with_wide(lambda y, c: ((y + c) * c[:5, None]).bfloat16()), ALL, "makes torch.float32"),
        (with_constant(lambda y, c: y * c[:5, None]), ALL, "more than one number for every"),
        (with_constant(lambda y, c: y * c.outer(c)[:5]), ALL, "more than one number for every"),
        (with_constant(lambda y, c: y * c[:2, None, None]), ALL, "more than one number"),
        (with_constant(lambda y, c: y * c[:1].view(1, 1, 1, 1)), ALL, "makes torch.float32"),
        (with_constant(lambda y, c: y / 0), ALL, "divides by zero"),
        (with_constant(lambda y, c: y / 1e-300), ALL, "too large"),
        (with_constant(lambda y, c: y * float("inf")), ALL, "too large"),
        (with_constant(lambda y, c: y + float("nan")), ALL, "too large"),
        (with_half(lambda y, c: y * 1e-4), ALL, "lose digits in float16"),
        (with_half(lambda y, c: y * 1e3), ALL, "lose digits in float16"),
        (with_half(lambda y, c: torch.add(c, y, alpha=1e3)), ALL, "lose digits in float16"),
        (with_half(lambda y, c: y * c), ALL, "by a tensor may leave the range of float16"),
        (with_half(lambda y, c: y / c), ALL, "by a tensor may leave the range of float16"),
        (read_twice, ALL, "others read view_1, too"),
        (view_read_twice, ALL, "others read view_2, too"),
        (scaled, ALL, "no plain product"),
        (split_columns, ALL, "more than one number for every channel"),
        (deep_nothing, ALL, "is empty"),
    ],
)
def test_what_is_not_folded_says_why(
    fn: Callable[..., Any], weights: tuple[int, ...], reason: str
) -> None:
    module = with_weights(fn, (*ROWS, CHANNELS), weights)
    before, ctx = str(module.graph), Ctx()

    assert fold_binary(module.graph, ctx) == 0
    assert str(module.graph) == before
    assert len(ctx.record.notes) == 1
    assert reason in ctx.record.notes[0]


def of_other_values(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return linear(x, w, b) + x[..., :6]


def of_weights_alone(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (w @ w.t()) * 2 + x.sum()


@pytest.mark.parametrize("fn", [of_other_values, of_weights_alone])
def test_nothing_is_said_where_nobody_would_expect_a_fold(fn: Callable[..., Any]) -> None:
    _, ctx = rewritten(fn, (*ROWS, CHANNELS), ALL, fold_binary)
    assert ctx.record.notes == []


def test_without_fuel_the_graph_is_unchanged() -> None:
    graph = with_weights(with_constant(lambda y, c: y * c), (*ROWS, CHANNELS), ALL).graph
    before, ctx = str(graph), Ctx(fuel=Fuel(left=0))

    assert fold_binary(graph, ctx) == 0
    assert str(graph) == before
    assert ctx.record.notes == ["mul not folded: there is no fuel left"]


def test_a_summand_may_be_folded_where_a_large_weight_is_read_elsewhere() -> None:
    def times(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return (F.linear(x, w) * c).relu() + w[0, 0] * x.sum()

    def plus(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        return (F.linear(x, w) + c).relu() + w[0, 0] * x.sum()

    given = (torch.randn(4, 1024), torch.randn(512, 1024), torch.randn(512))
    _, ctx = rewritten(times, given, (1, 2), fold_binary)
    assert "which is large, too" in ctx.record.notes[0]
    _, ctx = rewritten(plus, given, (1, 2), fold_binary)
    assert ctx.record.notes[0] == "add is folded"


def test_a_weight_that_would_grow_too_much_is_left_alone() -> None:
    """In float64 it would take more than is kept: it would be computed at every call."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.expand(1024, 1024)) * 2

    module, ctx = rewritten(fn, (torch.randn(4, 1024), torch.randn(1, 1)), (1,), fold_binary)
    assert "too large to keep" in ctx.record.notes[0]
    module.graph.lint()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("where", [1, 2, 3])
def test_channels_without_numbers_stay_so_and_others_are_not_touched(
    bad: float, name: str, where: int
) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ARITHMETIC[name](convolution(x, w, b), c.view(-1, 1, 1))

    given = tuple(one.clone() for one in (IMAGE[0].abs() + 0.5, *IMAGE[1:], CHANNELS))
    given[where][2] = bad
    module, _ = rewritten(fn, given, ALL, fold_binary)
    (found,), _ = run_with_constants(module, given)
    expected = fn(*given)

    if name == "div" and where == 3 and bad in (float("inf"), -float("inf")):
        assert (found[:, 2] == 0).all()
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found[:, [0, 1, 3]], expected[:, [0, 1, 3]])
