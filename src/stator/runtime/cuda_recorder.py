"""Recordings on a GPU: the few calls of torch.cuda that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final

import torch

from stator.core.torch_types import Boxed
from stator.torch_api import end_allocation


@dataclass(eq=False)
class CudaRecorder:
    """Records on one GPU, on a stream of its own.

    All recordings of a device share that stream, and so the workspace that a library has for it:
    their replays wait for each other, on whatever streams they run.
    """

    device: torch.device
    lock: Any = field(default_factory=RLock)  # from the first copy in to the last one out
    stream: Any = None
    last: Any = None  # where something was replayed

    def new_pool(self) -> Any:
        """Memory that recordings share."""
        return torch.cuda.graph_pool_handle()

    def is_recording(self) -> bool:
        """Whether somebody records what is done now."""
        return is_recorded(self.device)

    def order(self) -> Any:
        """Let what is done now wait for what was replayed before; the stream that does it."""
        now = torch.cuda.current_stream(self.device)
        if self.last != now:
            if self.last is not None:
                now.wait_stream(self.last)
            self.last = now
        return self.last

    def record(
        self, pool: Any, run: Boxed, arguments: list[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a call, without doing it; a function that does it, and the results."""
        with torch.cuda.device(self.device):
            if self.stream is None:
                self.stream = torch.cuda.Stream(self.device)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool has none of what others had
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                # Other threads may allocate meanwhile; this one is watched.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = run(arguments)
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, pool)
                    raise
        return graph.replay, results

    def _abandon(self, graph: Any, pool: Any) -> None:
        """Leave a recording that failed: for torch's allocator and generator it goes on."""
        with suppress(RuntimeError):
            graph.capture_end()
        end_allocation(self.device, pool)
        with suppress(RuntimeError):  # the generator is told by the end of a recording
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            other.capture_end()


def is_recorded(device: torch.device) -> bool:
    """Whether what is done now on a GPU goes into a recording, ours or somebody else's."""
    if device.index == torch.cuda.current_device():
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


_recorders: Final[dict[torch.device, CudaRecorder]] = {}


def recorder_of(device: torch.device) -> CudaRecorder:
    """The recorder of a device; there is one."""
    return _recorders.setdefault(device, CudaRecorder(device))
