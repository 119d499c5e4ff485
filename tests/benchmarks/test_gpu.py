"""The GPU's measurements, tried on the CPU with tiny sizes: who is called, what is written down."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import Measurer, chosen_rows, failed, run
from benchmarks.gpu_cases import CASES, HOST, KERNELS, ORDER, furthest, nearest_dropout
from benchmarks.gpu_clock import CpuClock, copy_rate
from benchmarks.gpu_host import measure_host
from benchmarks.gpu_measure import Settings, measure, own_code
from benchmarks.gpu_record import EAGER, STATOR, GpuOutcome, GpuRow, GpuRun, load, merged, store
from benchmarks.gpu_report import section, text_table, write_results

SETTINGS = Settings("cpu", tiny=True, seconds=0.0, contenders=(EAGER, STATOR))


def silent(phase: str) -> None:
    """Nobody listens."""


def row(name: str, ours: float = 1.0, theirs: float = 2.0) -> GpuRow:
    """A row in which Stator takes `ours` seconds and eager `theirs`."""
    outcomes = {
        EAGER: GpuOutcome(device=[theirs] * 3, whole=[theirs] * 3, off=1e-3, peak=100),
        STATOR: GpuOutcome(device=[ours] * 3, whole=[ours] * 3, off=1e-3, compile=0.5, peak=50),
    }
    return GpuRow(name, "kernel", "8x8", True, moved=8, copy=16.0, outcomes=outcomes)


@pytest.mark.parametrize("name", ["rmsnorm_residual", "dropout_residual", "resnet50_train"])
def test_a_row_has_times_and_errors_of_every_contender(name: str) -> None:
    found = measure(CASES[name], CpuClock(), SETTINGS, silent)

    assert set(found.outcomes) == {EAGER, STATOR}
    for outcome in found.outcomes.values():
        assert outcome.error is None
        assert len(outcome.device) == len(outcome.whole) >= 5
        assert outcome.off is not None
        assert not outcome.is_wrong
    assert found.outcomes[STATOR].compile
    assert found.moved > 0


def test_the_host_row_has_every_way_to_call() -> None:
    found = measure_host(CpuClock(), SETTINGS, silent)

    assert set(found.outcomes) == {"eager", "dynamo", "stator", "stator_alone"}
    assert all(outcome.whole for outcome in found.outcomes.values())


def test_every_kernel_has_its_size_of_the_baseline() -> None:
    assert len(KERNELS) == 14
    assert sum(kernel.memory_bound for kernel in KERNELS) == 11


def test_a_run_writes_each_row_and_survives_one_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(self: Measurer, name: str) -> GpuRow:
        return row(name) if name == "softmax" else failed(name, "the process died")

    monkeypatch.setattr(Measurer, "row", answered)
    file = tmp_path / "gpu.json"

    found = run(["layernorm", "softmax"], SETTINGS, file, deadline=60)

    assert load(file) == found
    assert [one.name for one in found.rows] == ["softmax", "layernorm"]  # in the table's order
    assert "the process died" in text_table(found)


def test_rows_after_the_deadline_are_said_not_to_be_begun(tmp_path: Path) -> None:
    found = run(["softmax"], SETTINGS, tmp_path / "gpu.json", deadline=-1)

    assert found.rows[0].error is not None
    assert "not begun" in found.rows[0].error


def test_rows_are_chosen_by_name_and_kind() -> None:
    assert chosen_rows("rotary,softmax", False, False) == ["softmax", "rotary"]
    assert chosen_rows("", True, False)[0] == HOST
    assert set(chosen_rows("", True, True)) == set(ORDER) == set(chosen_rows("", False, False))
    with pytest.raises(SystemExit):
        chosen_rows("none", False, False)


def test_of_several_runs_the_last_that_has_times_counts() -> None:
    first, second = row("softmax", 1.0), row("softmax", 0.5)
    lost = failed("softmax", "died")

    joined = merged([GpuRun({"a": 1}, [first]), GpuRun({}, [second]), GpuRun({}, [lost])], ORDER)

    assert joined.rows == [second]
    assert joined.machine == {"a": 1}


def test_what_follows_from_times() -> None:
    found = row("softmax", ours=1.0, theirs=2.0)

    assert found.of_copy(STATOR) == 0.5
    assert found.ahead_of_stator() == []
    assert row("softmax", ours=2.0, theirs=1.0).ahead_of_stator() == [EAGER]


def test_results_get_a_section_and_keep_it(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n")
    wrong = replace(row("rotary"), outcomes={STATOR: GpuOutcome(error="no such thing")})
    found = GpuRun({"device": "a card"}, [row("softmax"), wrong, failed("swiglu", "took too long")])

    write_results(found, file)
    write_results(found, file)

    text = file.read_text()
    assert text.count("<!-- gpu -->") == 1
    assert section(found) in text
    assert "| softmax | 8x8 | 2.00 (2.00–2.00) |" in text
    assert "swiglu: not measured: took too long" in text
    assert "rotary, stator: no such thing" in text


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    found = GpuRun({"device": "a card"}, [row("softmax"), failed(HOST, "died")])
    store(found, tmp_path / "a" / "gpu.json")

    assert load(tmp_path / "a" / "gpu.json") == found


def test_errors_are_relative_and_nan_is_infinite() -> None:
    exact = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)

    assert furthest(exact.float(), exact) == 0
    assert furthest(torch.tensor([1.0, -2.0, 2.5]), exact) == pytest.approx(0.25)
    assert furthest(torch.tensor([1.0, -2.0, math.nan]), exact) == math.inf
    assert furthest(exact[:2], exact) == math.inf


def test_dropout_is_compared_with_what_it_chose() -> None:
    x, residual = torch.randn(2, 200, 200, dtype=torch.float64).unbind()
    kept = torch.rand(200, 200) >= 0.1
    result = residual + torch.where(kept, x / 0.9, 0.0)

    assert torch.equal(nearest_dropout([x, residual], result), result)
    assert nearest_dropout([x, residual], residual).isnan().all()  # all of it is dropped


def test_contenders_have_code_of_their_own() -> None:
    def plain(x: Tensor) -> Tensor:
        return x + 1

    other = own_code(plain, "other")

    assert other.__code__ != plain.__code__
    assert float(other(torch.ones(()))) == 2


def test_a_copy_has_a_rate() -> None:
    assert copy_rate(CpuClock(), 1 << 12) > 0
