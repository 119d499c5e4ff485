"""The quick trace gives what the full one gives, and leaves to it what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stator
from stator.aot.compile import to_fake
from stator.aot.quick import record, why_not_quick
from stator.aot.trace import trace
from stator.torch_api import version_of
from tests.aot.traces import Program, assert_same_lines

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
    "written_input": lambda x, w: [x.add_(1).mul_(w), x * 2],
    "drawn": lambda x, w: [torch.rand(3), F.dropout(x), torch.empty(3).normal_(), x.bernoulli()],
    "written_when_new": lambda x, w: [torch.full((4, 4), 2.0).triu_(1).add_(x)],
    "statistics": lambda x, w: [F.batch_norm(w, x[0].clone(), x[1].clone(), training=True)],
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
    "writes_to_what_may_be_trained": lambda x, w: [w.add_(1)],
    "turns_an_input_in_place": lambda x, w: [x.t_() * 2],
    "writes_to_rows_of_an_input": lambda x, w: [x[0].zero_() * 2],
    "writes_through_a_view": _writes_through_a_view,
    "writes_another_type": lambda x, w: [(x > 0).add_(w > 0), x.long().mul_(2), x.half().add_(w)],
    "returns_a_view_of_an_input": lambda x, w: [x.t()],
    "returns_two_views": lambda x, w: list((x * 2).split(2)),
    "draws_from_a_generator": lambda x, w: [torch.rand(3, generator=torch.Generator())],
    "looks": _looks,
    "has_sizes_of_values": lambda x, w: [x.nonzero()],
    "takes_elements_by_truths": lambda x, w: [x[x > 0]],
    "holds_a_tensor": lambda x, w: [x + held],
    "leaves_grad_mode_on": _leaves_grad_mode_on,
}


def _inputs() -> tuple[list[torch.Tensor], Any]:
    return to_fake([torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))])


@pytest.mark.parametrize("name", SAME)
def test_quick_trace_is_the_full_one(name: str) -> None:
    with torch.no_grad():
        inputs, mode = _inputs()
        assert_same_lines(SAME[name], inputs, mode)
    assert [version_of(value) for value in inputs] == [0, 0]


def test_all_of_a_program_without_a_backward_is_forward() -> None:
    with torch.no_grad():
        inputs, mode = _inputs()
        traced = trace(SAME["norm"], inputs, mode, may_run_again=True)
    assert all(n.meta["in_forward"] for n in traced.module.graph.nodes if n.op != "output")


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_simple_is_left_to_the_full_trace(name: str) -> None:
    with torch.no_grad():
        inputs, mode = _inputs()
        with mode:
            assert isinstance(record(LEFT[name], inputs), str), "it says why"
        assert not torch.is_grad_enabled()
    assert [value.requires_grad for value in inputs] == [False, True]


def test_inputs_are_plain_tensors_each_once() -> None:
    inputs, _ = _inputs()
    assert why_not_quick(inputs) is None
    assert why_not_quick([*inputs, 3]) == "an input is of type int"
    assert why_not_quick([inputs[0], inputs[0]]) == "an input is given twice"
    with torch.autocast("cpu"):
        assert why_not_quick(inputs) == "autocast is on"
    with torch.inference_mode():
        assert why_not_quick(inputs) == "it is traced in inference mode"


def _notes(program: Any, *inputs: Any, dynamic: bool = False) -> list[str]:
    torch.compile(program, backend="stator", dynamic=dynamic, options={"cache": False})(*inputs)
    record = stator.last_compilation()
    assert record is not None
    return [note for note in record.notes if note.startswith("traced in full")]


def test_a_compilation_notes_why_it_was_traced_in_full() -> None:
    x = torch.randn(4, 4)

    def mapped(x: torch.Tensor) -> Any:
        return torch.vmap(torch.sin)(x)

    def start(reason: str) -> list[str]:
        return [f"traced in full, which takes longer: {reason}"]

    assert _notes(torch.sin, x) == []
    assert _notes(torch.sin, x, dynamic=True) == start("sizes are symbols")
    assert _notes(mapped, x) == start("it holds an operator that takes functions")
    with torch.autocast("cpu", torch.bfloat16):
        assert _notes(torch.mm, x, x) == start("autocast is on")


def test_users_function_runs_once() -> None:
    calls = []

    def program(x: torch.Tensor) -> list[Any]:
        calls.append(x)
        return [x * 2]

    with torch.no_grad():
        inputs, mode = to_fake([torch.randn(3)])
        trace(program, inputs, mode)
    assert len(calls) == 1
