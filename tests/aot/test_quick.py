"""The quick trace gives what the full one gives, and leaves to it what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stator.aot.compile import to_fake
from stator.aot.quick import may_be_quick, record
from stator.aot.trace import Traced, trace
from stator.graph.edit import drop_unread

Program = Callable[..., list[Any]]
F = nn.functional


def _made(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return [torch.where(mask, x, 0.0) * torch.zeros_like(x).scatter(1, mask.long(), 1.0), 3, None]


def _transposed_rows(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    return [F.linear(x.expand(3, 4, 4).transpose(0, 1), w)]


def _written(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    y = F.batch_norm(x, w[0], w[1].abs()).relu_()
    y.add_(y.mean()).mul_(2)
    return [y, y.t().exp(), y]


SAME: dict[str, Program] = {
    "norm": lambda x, w: [F.layer_norm(F.linear(x, w), (4,)), x],
    "made": _made,
    "rows_that_lie_apart": _transposed_rows,
    "written": _written,
    "several": lambda x, w: [*torch.var_mean(x, 0), *(part * 2 for part in x.split(2))],
    "elements_by_number": lambda x, w: [x[torch.arange(3)[:, None], torch.arange(2)]],
    "attention": lambda x, w: [F.scaled_dot_product_attention(*(y[None, None] for y in (x, w, x)))],
}


def _looks(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    return [x * x.sum().item()]


def _writes_through_a_view(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    y = x * 2
    y[0].zero_()
    return [y]


def _leaves_grad_mode_on(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    torch.set_grad_enabled(True)
    return [x * 2]


held = torch.ones(4)

LEFT: dict[str, Program] = {
    "writes_to_an_input": lambda x, w: [x.add_(1)],
    "writes_through_a_view": _writes_through_a_view,
    "writes_another_type": lambda x, w: [(x > 0).add_(w > 0), x.long().mul_(2), x.half().add_(w)],
    "returns_a_view_of_an_input": lambda x, w: [x.t()],
    "returns_two_views": lambda x, w: list((x * 2).split(2)),
    "draws": lambda x, w: [torch.rand(3)],
    "looks": _looks,
    "has_sizes_of_values": lambda x, w: [x.nonzero()],
    "takes_elements_by_truths": lambda x, w: [x[x > 0]],
    "holds_a_tensor": lambda x, w: [x + held],
    "leaves_grad_mode_on": _leaves_grad_mode_on,
}


def _inputs() -> tuple[list[torch.Tensor], Any]:
    return to_fake([torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))])


def _lines(traced: Traced) -> list[str]:
    """The graph without what nobody reads, such as views that functionalization takes anew."""
    drop_unread(traced.module.graph)
    names = {node.name: f"v{number}" for number, node in enumerate(traced.module.graph.nodes)}
    rows = []
    for node in traced.module.graph.nodes:
        given = torch.fx.map_arg((node.args, node.kwargs), lambda one: names[one.name])
        rows.append(f"{names[node.name]} = {node.target}{given}: {_told(node.meta.get('val'))}")
    return rows


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.size()} {value.stride()} {value.requires_grad}"
    return str([_told(one) for one in value]) if isinstance(value, list | tuple) else str(value)


@pytest.mark.parametrize("name", SAME)
def test_quick_trace_is_the_full_one(name: str) -> None:
    with torch.no_grad():
        inputs, mode = _inputs()
        assert may_be_quick(inputs)
        with mode:
            assert record(SAME[name], inputs) is not None
        quick = trace(SAME[name], inputs, mode, may_run_again=True)
        full = trace(SAME[name], inputs, mode)
    assert "in_forward" in next(iter(quick.module.graph.nodes)).meta
    assert quick.program == full.program
    assert _lines(quick) == _lines(full)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_simple_is_left_to_the_full_trace(name: str) -> None:
    with torch.no_grad():
        inputs, mode = _inputs()
        with mode:
            assert record(LEFT[name], inputs) is None
        assert not torch.is_grad_enabled()
    assert [value.requires_grad for value in inputs] == [False, True]


def test_only_programs_without_a_backward_are_traced_quickly() -> None:
    inputs, _ = _inputs()
    assert not may_be_quick(inputs)
    assert may_be_quick(inputs[:1])
    with torch.no_grad():
        assert not may_be_quick([*inputs, 3])
        assert not may_be_quick([inputs[0], inputs[0]])
        with torch.autocast("cpu"):
            assert not may_be_quick(inputs)


def test_users_function_runs_once() -> None:
    calls = []

    def program(x: torch.Tensor) -> list[Any]:
        calls.append(x)
        return [x * 2]

    with torch.no_grad():
        inputs, mode = to_fake([torch.randn(3)])
        trace(program, inputs, mode)
    assert len(calls) == 1
