"""Clocks and memory of a device: of a GPU, and of the CPU as its stand-in where there is none.

Device time is taken between two events around calls that wait in the queue: the device is kept busy
until the host has queued them all, so that it goes from one to the next and no host time is in it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch

Call: TypeAlias = Callable[[], Any]

COPIED: Final = 2 << 30  # bytes of the tensor that is copied: far beyond every cache
COPY_ROUNDS: Final = 12
LONGEST_HEAD_START: Final = 0.25  # seconds; the queue holds about a thousand launches anyway
SAFETY: Final = 1.5  # how much longer than the host needs the device is kept busy
SLEEP_PROBE: Final = 20_000_000  # cycles


class Clock(Protocol):
    """What measurements ask of a device."""

    device: torch.device

    def wait(self) -> None:
        """Until all that was queued is done; raises what went wrong on the device."""

    def device_seconds(self, calls: Sequence[Call]) -> float:
        """Mean time of the calls on the device alone, one after the other."""

    def held(self) -> int:
        """Bytes of tensors on the device."""

    def peak(self, call: Call) -> int:
        """The most bytes of tensors on the device while `call` runs."""


def queued_seconds(clock: Clock, calls: Sequence[Call]) -> float:
    """Mean time of calls made one after the other, from the first to the end of the last."""
    clock.wait()
    begin = time.perf_counter()
    for call in calls:
        call()
    clock.wait()
    return (time.perf_counter() - begin) / len(calls)


def waited_seconds(clock: Clock, calls: Sequence[Call]) -> float:
    """Median time of calls each of which is waited for: host and device, nothing hidden."""
    return statistics.median(queued_seconds(clock, [call]) for call in calls)


class CudaClock:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_second = self._calibrated()

    def wait(self) -> None:
        """Until the device is idle; a fault in a kernel is raised here."""
        torch.cuda.synchronize()

    def device_seconds(self, calls: Sequence[Call]) -> float:
        """Between two events, the device kept busy while the calls are queued.

        Once more with a longer head start, if the host took longer than the device was busy.
        """
        head_start = SAFETY * self._queueing_seconds(calls)
        seconds, queueing = self._timed(calls, head_start)
        if queueing > head_start and head_start < LONGEST_HEAD_START:
            seconds, _ = self._timed(calls, SAFETY * queueing)
        return seconds

    def held(self) -> int:
        """Bytes that torch's allocator has given out."""
        self.wait()
        return int(torch.cuda.memory_allocated())

    def peak(self, call: Call) -> int:
        """The allocator's own mark."""
        gc.collect()
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return int(torch.cuda.max_memory_allocated())

    def _queueing_seconds(self, calls: Sequence[Call]) -> float:
        """What the host needs to queue the calls."""
        self.wait()
        begin = time.perf_counter()
        for call in calls:
            call()
        queueing = time.perf_counter() - begin
        self.wait()
        return queueing

    def _timed(self, calls: Sequence[Call], head_start: float) -> tuple[float, float]:
        """Mean device time of a call, and what the host needed to queue all."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        self._keep_busy(min(head_start, LONGEST_HEAD_START))
        begin = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        queueing = time.perf_counter() - begin
        self.wait()
        return start.elapsed_time(end) / 1e3 / len(calls), queueing

    def _keep_busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _calibrated(self) -> float:
        """Cycles a second of the clock by which the device sleeps."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first brings the device to its speed
            start.record()
            torch.cuda._sleep(SLEEP_PROBE)
            end.record()
            torch.cuda.synchronize()
        return float(SLEEP_PROBE / (start.elapsed_time(end) / 1e3))


class CpuClock:
    """The CPU, where the host's time is the device's and nobody counts memory."""

    device = torch.device("cpu")

    def wait(self) -> None:
        """Nothing is ever queued."""

    def device_seconds(self, calls: Sequence[Call]) -> float:
        """The host's time."""
        return queued_seconds(self, calls)

    def held(self) -> int:
        """Not known."""
        return 0

    def peak(self, call: Call) -> int:
        """Not known."""
        call()
        return 0


def clock_of(device: str) -> Clock:
    """The clock of "cuda" or "cpu"."""
    return CudaClock() if device == "cuda" else CpuClock()


def copy_rate(clock: Clock, size: int = COPIED) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.randn(size // 4, device=clock.device)
    target = torch.empty_like(source)
    calls = [lambda: target.copy_(source)] * 4
    times = [clock.device_seconds(calls) for _ in range(COPY_ROUNDS)]
    return 2 * size / statistics.median(times)
