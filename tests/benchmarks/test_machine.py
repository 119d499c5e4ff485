"""Who used the cores."""

import os
import platform
import subprocess
import sys

import pytest

from benchmarks.machine import (
    KEEPS_PAGES,
    CpuReading,
    busy_seconds,
    foreign_share,
    page_faults,
    read_cpu,
)


def test_busy_is_all_but_waiting() -> None:
    #       user nice system idle iowait irq softirq steal guest guest_nice
    text = "cpu  100 10 50 9999 77 5 5 30 100 10\ncpu0 1 2 3\n"

    assert busy_seconds(text, ticks=100) == pytest.approx(2.0)


def test_foreign_is_what_is_busy_and_not_ours() -> None:
    begin, end = CpuReading(0.0, 10.0, 1.0), CpuReading(2.0, 13.0, 3.0)

    assert foreign_share(begin, end, cores=2) == pytest.approx(0.25)


def test_coarse_ticks_do_not_make_it_negative() -> None:
    assert foreign_share(CpuReading(0, 0, 0), CpuReading(1, 0.98, 1), cores=2) == 0


def test_it_is_unknown_where_the_system_does_not_say() -> None:
    assert foreign_share(CpuReading(0, None, 0), CpuReading(1, None, 1), cores=2) is None


def test_clocks_go_forward() -> None:
    begin, faults = read_cpu(), page_faults()
    sum(range(10**5))
    end = read_cpu()

    assert end.wall > begin.wall
    assert end.own >= begin.own
    assert page_faults() >= faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_process_that_is_asked_to_uses_its_pages_again() -> None:
    code = "from benchmarks.machine import reuses_pages; print(reuses_pages())"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **KEEPS_PAGES}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "True"
