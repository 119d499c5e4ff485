"""The machine under a measurement: threads, memory that is kept, page faults, who else runs."""

from __future__ import annotations

import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

THREADS: Final = 2  # of every contender
STATISTICS: Final = Path("/proc/stat")
# By default glibc gives large tensors back to the system and faults every page in again at the next
# call, or does not, by what happened to be allocated first.  Here nothing is mapped or trimmed, so
# that freed pages are used again.  Small chunks are merged at once, for the slivers that alignment
# cuts off would otherwise lie in a cache, and the hole beside them be too small for the next tensor
# of the same size: the heap would grow with every call.
KEEPS_PAGES: Final = {
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}={value}"
        for name, value in {
            "mmap_max": 0,
            "trim_threshold": 1 << 62,
            "tcache_count": 0,
            "mxfast": 0,
        }.items()
    )
}
PROBE: Final = 10_000_000  # elements


def has_compiler() -> bool:
    """Inductor compiles C++ on a CPU; is there something to compile it with?"""
    return any(shutil.which(name) for name in ("g++", "clang++"))


def reuses_pages() -> bool:
    """Whether tensors that come and go fault pages in: it is for who starts a process to say."""

    def come_and_go() -> int:
        before = page_faults()
        first, second = torch.ones(PROBE), torch.ones(2 * PROBE)
        del first, second
        return page_faults() - before

    fresh = come_and_go()
    return min(come_and_go() for _ in range(5)) < fresh / 10


def page_faults() -> int:
    """Pages that were faulted in for this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds since some moment: on the wall, of all cores at work, of this process."""

    wall: float
    busy: float | None  # None where the system does not say
    own: float


def busy_seconds(statistics: str, ticks: int) -> float:
    """Seconds that cores were at work, from the text of /proc/stat."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    values = map(int, statistics.splitlines()[0].split()[1:])
    counts = dict(zip(names, values, strict=False))
    # Stolen time is work too: that of another guest on our cores.
    return sum(count for name, count in counts.items() if name not in ("idle", "iowait")) / ticks


def read_cpu() -> CpuReading:
    """The clocks now."""
    busy = None
    if STATISTICS.exists():
        busy = busy_seconds(STATISTICS.read_text(encoding="ascii"), os.sysconf("SC_CLK_TCK"))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return CpuReading(time.perf_counter(), busy, usage.ru_utime + usage.ru_stime)


def foreign_share(begin: CpuReading, end: CpuReading, cores: int) -> float | None:
    """The share of all cores that other processes used between two readings."""
    if begin.busy is None or end.busy is None:
        return None
    foreign = (end.busy - begin.busy) - (end.own - begin.own)
    return max(0.0, foreign / (cores * (end.wall - begin.wall)))  # ticks are coarse: may be below 0
