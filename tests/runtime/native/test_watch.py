"""Programs that tell what they do: ranges for torch's profiler, times for explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from stator.core.events import collected_records
from stator.runtime.native.watch import Ranges, Times
from stator.runtime.origins import labels_of

EXECUTORS = pytest.mark.parametrize("executor", ["native", "python"])
THIS = __file__.rpartition("/")[2]


def names_in(call: Callable[[], object]) -> list[str]:
    """The names that the profiler sees."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return [event.name for event in seen.events()]


def scores(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(x @ weight, -1) * 2


@EXECUTORS
def test_the_profiler_sees_kernels_and_calls_with_lines(executor: str) -> None:
    options = {"profile_ranges": True, "executor": executor, "strict": True}
    compiled = torch.compile(scores, backend="stator", options=options)
    x, weight = torch.randn(8, 8), torch.randn(8, 8)
    assert torch.allclose(compiled(x, weight), scores(x, weight))

    ours = [name for name in names_in(lambda: compiled(x, weight)) if THIS in name]

    line = scores.__code__.co_firstlineno + 1
    assert f"aten.mm.default ({THIS}:{line})" in ours
    (kernel,) = [name for name in ours if name.startswith("kernel_")]
    assert kernel.endswith(f"_softmax+mul ({THIS}:{line})")


def test_without_the_option_the_profiler_sees_none() -> None:
    compiled = torch.compile(scores, backend="stator")
    x, weight = torch.randn(8, 8), torch.randn(8, 8)
    compiled(x, weight)

    assert not [name for name in names_in(lambda: compiled(x, weight)) if "kernel_" in name]


@EXECUTORS
def test_the_range_of_a_step_that_fails_is_closed(executor: str) -> None:
    def inverse(x: Tensor) -> Tensor:
        return torch.linalg.inv(x.exp() - x.exp()).cos()

    options = {"profile_ranges": True, "executor": executor}
    compiled = torch.compile(inverse, backend="stator", options=options)

    def both() -> None:
        with pytest.raises(RuntimeError, match="singular"):
            compiled(torch.ones(3, 3))
        torch.ones(5)

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        both()
        both()
    (*_, failed) = [event for event in seen.events() if "linalg_inv_ex" in event.name]
    (*_, last) = [event for event in seen.events() if event.name == "aten::ones"]
    assert last.cpu_parent is None or "inv" not in last.cpu_parent.name
    assert failed.time_range.end <= last.time_range.start


def test_torch_exports_what_ranges_need() -> None:
    assert Ranges.why_not() is None


def test_programs_without_ranges_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranges, "why_not", staticmethod(lambda: "torch does not export it"))
    with collected_records() as records:
        torch.compile(torch.exp, backend="stator", options={"profile_ranges": True})(torch.ones(3))

    assert "no ranges for the profiler: torch does not export it" in records[0].notes


def test_steps_are_counted_and_timed() -> None:
    with collected_records() as records:
        compiled = torch.compile(scores, backend="stator", options={"explain": True})
        for _ in range(5):
            compiled(torch.randn(64, 64), torch.randn(64, 64))
    details = records[0].details
    assert details is not None, "it was asked for"
    programmed: Any = details.plans["forward"]

    labels = labels_of(programmed.plan)
    assert len(labels) == 2
    for number in range(len(programmed.plan.steps)):
        count, total, least = programmed.times.step(number)
        if number in labels:
            assert count == 5
            assert 0 < 5 * least <= total
        else:
            assert (count, total, least) == (0, 0, 0)


def test_times_begin_with_nothing() -> None:
    assert Times.of(2).step(1) == (0, 0, 0)
