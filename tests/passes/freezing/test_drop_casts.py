"""Casts that change nothing, whatever stands between them, and those that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stator.core.fuel import Fuel
from stator.graph.run import Ctx
from stator.passes.freezing.drop_casts import drop_casts
from stator.passes.joint.drop_noops import drop_noops
from tests.passes.freezing.graphs import rewritten, run_with_constants, with_weights

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.5, -2.25, 3e-7]
HALVES = (torch.float16, torch.bfloat16)
f32, f64 = torch.float32, torch.float64


def at_once(x: Tensor) -> Tensor:
    return x.to(f32).to(x.dtype).sin()


def through_views(x: Tensor) -> Tensor:
    return x.to(f32).view(2, 4).t().to(x.dtype).sin()


def through_a_slice(x: Tensor) -> Tensor:
    return x.to(f64)[1:5].unsqueeze(0).expand(3, 4).to(x.dtype).sin()


def through_signs(x: Tensor) -> Tensor:
    return (-x.to(f32).view(2, 4).relu()).abs().to(x.dtype)


def returned(x: Tensor) -> Tensor:
    return x.to(f32).view(2, 4).to(x.dtype)


def to_a_third_type(x: Tensor) -> Tensor:
    other = torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16
    return (-x.to(f32).view(2, 4)).to(other)


def calls_of(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("fn", "casts"),
    [
        (at_once, 0),
        (through_views, 0),
        (through_a_slice, 0),
        (through_signs, 0),
        (returned, 0),
        (to_a_third_type, 1),
    ],
)
def test_trips_that_lose_nothing_are_not_made(
    fn: Callable[[Tensor], Tensor], casts: int, dtype: torch.dtype
) -> None:
    x = torch.tensor(SPECIAL).to(dtype)
    module, ctx = rewritten(fn, (x,), (), drop_casts)
    (found,), _ = run_with_constants(module, (x,))
    expected = fn(x)

    assert calls_of(module).count("aten._to_copy.default") == casts
    assert "is dropped" in ctx.record.notes[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.nan_to_num().signbit(), expected.nan_to_num().signbit())
    assert found.stride() == expected.stride()


def test_what_the_caller_gets_has_memory_of_its_own() -> None:
    x = torch.randn(8).half()
    module, _ = rewritten(returned, (x,), (), drop_casts, drop_noops)
    (found,), _ = run_with_constants(module, (x,))

    assert found.data_ptr() != x.data_ptr()


def test_drop_noops_takes_the_copy_away() -> None:
    module, _ = rewritten(through_views, (torch.randn(8).half(),), (), drop_casts, drop_noops)
    assert calls_of(module) == ["aten.view.default", "aten.t.default", "aten.sin.default"]


def test_weights_are_no_different() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.float().t().half()

    given = (torch.randn(2, 3).half(), torch.randn(4, 3).half())
    module, _ = rewritten(fn, given, (1,), drop_casts)
    assert "aten._to_copy.default" not in calls_of(module)
    torch.testing.assert_close(run_with_constants(module, given)[0][0], fn(*given))


def test_no_elements_make_no_trip_either() -> None:
    module, _ = rewritten(through_signs_of_nothing, (torch.randn(0, 3).half(),), (), drop_casts)
    assert "aten._to_copy.default" not in calls_of(module)


def through_signs_of_nothing(x: Tensor) -> Tensor:
    return x.float().relu().half()


# --- what is not dropped ---


def rounded(x: Tensor) -> Tensor:
    return x.float().to(torch.bfloat16).view(2, 4).float()


def between_halves(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).view(2, 4).to(torch.float16)


def whole_numbers(x: Tensor) -> Tensor:
    return x.int().view(2, 4).half()


def to_whole_numbers(x: Tensor) -> Tensor:
    return x.float().view(2, 4).int()


def read_twice(x: Tensor) -> Tensor:
    y = x.float()
    return y.view(2, 4).half() + y.sum()


def view_read_twice(x: Tensor) -> Tensor:
    y = x.float().view(2, 4)
    return y.half() + y.sum()


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (rounded, f32, "rounds torch.float32 to torch.bfloat16"),
        (between_halves, torch.float16, "rounds torch.float16 to torch.bfloat16"),
        (whole_numbers, torch.float16, "no usual floating-point type"),
        (to_whole_numbers, torch.float16, "no usual floating-point type"),
        (read_twice, torch.float16, "others read _to_copy, too"),
        (view_read_twice, torch.float16, "others read view, too"),
    ],
)
def test_what_is_not_dropped_says_why(
    fn: Callable[..., Any], dtype: torch.dtype, reason: str
) -> None:
    module = with_weights(fn, (torch.randn(8).to(dtype),), ())
    before, ctx = str(module.graph), Ctx()

    assert drop_casts(module.graph, ctx) == 0
    assert str(module.graph) == before
    assert len(ctx.record.notes) == 1
    assert reason in ctx.record.notes[0]


def computed_between(x: Tensor) -> Tensor:
    return x.float().exp().half()


def alone(x: Tensor) -> Tensor:
    return x.float() + 1


@pytest.mark.parametrize("fn", [computed_between, alone])
def test_casts_that_compute_with_more_digits_are_none_of_this(fn: Callable[..., Any]) -> None:
    module, ctx = rewritten(fn, (torch.randn(8).half(),), (), drop_casts)

    assert "aten._to_copy.default" in calls_of(module)
    assert ctx.record.notes == []


def test_an_input_that_is_written_in_between_is_not_read_later() -> None:
    graph = with_weights(at_once, (torch.randn(8).half(),), ()).graph
    first, _ = graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    with graph.inserting_after(first):
        graph.call_function(torch.ops.aten.copy_.default, (first.args[0], first.args[0]))
    ctx = Ctx()

    assert drop_casts(graph, ctx) == 0
    assert "writes in between" in ctx.record.notes[0]


def test_without_fuel_the_graph_is_unchanged() -> None:
    graph = with_weights(through_views, (torch.randn(8).half(),), ()).graph
    before, ctx = str(graph), Ctx(fuel=Fuel(left=0))

    assert drop_casts(graph, ctx) == 0
    assert str(graph) == before
    assert ctx.record.notes == ["_to_copy_1 not dropped: there is no fuel left"]
