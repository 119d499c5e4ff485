"""Kernels compiled side by side, in processes of their own.

Triton's compiler is Python for the most part, so threads of one process would wait for each other.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any, Final

from stator.codegen.llvm.backend import processors
from stator.codegen.triton.kernel import Written
from stator.codegen.triton.translate import Cubin, Request, translate
from stator.errors import CompileError

MOST_WORKERS: Final = 16
PATIENCE: Final = 120.0  # seconds after which a worker ends that nobody asks
WORTH_WORKERS: Final = 2  # kernels: one alone is compiled here


def compile_all(
    kernels: Sequence[Written], capability: int, *, aligned: bool = True
) -> list[Cubin]:
    """Machine code for cards of that capability (90: Hopper)."""
    return begin_all(kernels, capability, aligned=aligned)()


def begin_all(
    kernels: Sequence[Written], capability: int, *, aligned: bool = True
) -> Callable[[], list[Cubin]]:
    """The same, begun: what is returned waits for it."""
    requests = _requests(kernels, capability, aligned)
    if len(requests) < WORTH_WORKERS:
        return lambda: [translate(request) for request in requests]
    return workers().begin(requests)


def compile_each(
    kernels: Sequence[Written], capability: int, *, aligned: bool = True
) -> list[Cubin | None]:
    """The same of kernels that need not work: None for those that do not."""
    requests = _requests(kernels, capability, aligned)
    return workers().try_each(requests) if requests else []


def has_triton() -> bool:
    """Whether it is installed; it is not asked for more."""
    return find_spec("triton") is not None


def _requests(kernels: Sequence[Written], capability: int, aligned: bool) -> list[Request]:
    if not has_triton():
        raise CompileError(
            "kernels",
            "kernels for a GPU are compiled by Triton, which is not installed",
            hint="install triton, or pass Options(kernels=False): torch runs every operator then",
        )
    return [
        Request(w.name, w.source, w.signature, w.shape.warps, w.shape.stages, capability, aligned)
        for w in kernels
    ]


def workers() -> Workers:
    """Those of this process; the first call starts them."""
    with _lock:
        return _workers()


@cache
def _workers() -> Workers:
    return Workers(min(MOST_WORKERS, processors()))


_lock: Final = Lock()


def _begin_child() -> None:
    """A forked child has the pipes of its parent's workers and none of its threads."""
    _workers.cache_clear()
    _lock.release()


# Taken around a fork, so that a child finds it free.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child
)


class Workers:
    """Processes that wait for kernels to compile."""

    def __init__(self, count: int, patience: float = PATIENCE) -> None:
        self.patience = patience
        # The last that was busy is the first to be asked again: it has read and compiled most.
        self.idle: LifoQueue[Any] = LifoQueue()
        self.pool = ThreadPoolExecutor(count)
        self.owner = os.getpid()
        self.processes: list[Any] = []
        with suppress(OSError):  # no more can be started: those there are do it, or this one
            self.processes += (_started(patience) for _ in range(count))
        for process in self.processes:
            self.idle.put(process)
        atexit.register(self.close)

    def compile(self, requests: Sequence[Request]) -> list[Cubin]:
        """All of them, each by whoever is free."""
        return self.begin(requests)()

    def begin(self, requests: Sequence[Request]) -> Callable[[], list[Cubin]]:
        """The same, begun: what is returned waits for it."""
        made = self.pool.map(self._compile, requests)
        return lambda: list(made)

    def try_each(self, requests: Sequence[Request]) -> list[Cubin | None]:
        """Those that can be compiled."""
        return list(self.pool.map(self._answer, requests))

    def _compile(self, request: Request) -> Cubin:
        # What a worker could not do is done here, and says here what is wrong.
        return self._answer(request) or translate(request)

    def _answer(self, request: Request) -> Cubin | None:
        if not self.processes:
            return None
        process = self.idle.get()
        if process.poll() is not None:  # it waited long enough, or was ended
            process = self._successor(process)
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except Exception:  # whatever it is: what comes next from there would answer this request
            answer = None  # it died: of memory, perhaps
            process = self._successor(process)
        finally:
            self.idle.put(process)
        return answer if isinstance(answer, Cubin) else None

    def _successor(self, process: Any) -> Any:
        """A new worker in place of one that died; the dead one, where none can be started."""
        try:
            fresh = _started(self.patience)
        except OSError:
            return process
        process.kill()
        process.communicate()  # closes what it read and wrote
        self.processes[self.processes.index(process)] = fresh
        return fresh

    def close(self) -> None:
        """End them, and wait until they have."""
        if os.getpid() != self.owner:  # a forked child, which ends before its parent
            return
        self.pool.shutdown(wait=False)
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.communicate()


def _started(patience: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(patience)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
