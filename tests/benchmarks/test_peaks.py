"""The peak of some calls is what the system says of the process."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peaks import MEBIBYTE, STATUS, kibibytes, peak


def test_a_line_of_the_status_is_read() -> None:
    status = "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"

    assert kibibytes(status, "VmHWM") == 2048
    assert kibibytes(status, "VmSwap") is None


@pytest.mark.skipif(not STATUS.exists(), reason="the system says nothing of a process")
def test_a_peak_is_of_the_calls_alone() -> None:
    # 64 MiB each: more than glibc's allocator would keep.
    before = torch.ones(16 * MEBIBYTE)  # not counted

    needed = peak(lambda: torch.ones(16 * MEBIBYTE) + 1)

    assert before.numel()
    assert needed is None or 120 * MEBIBYTE <= needed < 170 * MEBIBYTE
